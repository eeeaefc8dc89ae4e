"""Conformance traces: what a bundle does in every kind of case, written down to judge any runtime by."""
