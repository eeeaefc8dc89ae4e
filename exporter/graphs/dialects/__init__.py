"""The operator sets that the graphs can be written in; the graphs themselves know none of them by name."""
