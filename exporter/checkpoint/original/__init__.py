"""Checkpoints in a layout of their authors': what Hugging Face's layout has in files of its own is elsewhere."""
