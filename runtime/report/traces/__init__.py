"""Conformance traces: the results of a bundle in every kind of case, by which any runtime is judged."""
