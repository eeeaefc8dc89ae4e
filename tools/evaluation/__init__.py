"""Benchmarks of the field over local files: their formats, their metrics, accuracy beside cost."""
