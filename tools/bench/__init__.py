"""Measuring bundles where they run: times, memory, and how near they come to what the machine can do."""
