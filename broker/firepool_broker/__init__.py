"""Firepool-nb."""
