"""Models held in memory, and the answers that they compute side by side."""
