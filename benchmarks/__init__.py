"""Benchmarks of Firepool-nb: run by `firepool bench` from a source checkout."""
