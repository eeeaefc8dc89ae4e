"""Model families, one file each: their configuration, and the tokens of an image."""
