"""Firepool-nb."""

__version__ = "0.1.0"
