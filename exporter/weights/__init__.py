"""The weights of a bundle: the form of each, where it lies, and how it gets there."""
