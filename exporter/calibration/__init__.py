"""Choosing K: data, calibration, and gates that choose per question."""
