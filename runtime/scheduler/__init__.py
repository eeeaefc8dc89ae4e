"""Answers of one model that are computed side by side: for the server, for files of questions, for benchmarks."""
