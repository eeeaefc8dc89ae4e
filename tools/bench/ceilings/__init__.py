"""The most that this machine can do: matrix products and reading memory."""
