"""What a manifest declares: sizes, settings, and the inputs and outputs of every graph."""
