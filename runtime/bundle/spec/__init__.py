"""The declarations of a manifest: sizes, settings, and the inputs and outputs of every graph."""
