"""Quantised checkpoints: a file for each way of storing a matrix as integers or table entries with scales."""
