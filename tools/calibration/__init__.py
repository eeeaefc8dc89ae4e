"""Calibration without its measurement: curves with their intervals, the choice of K, reports and pictures."""
