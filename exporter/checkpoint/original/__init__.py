"""Checkpoints in their authors' layouts: pickled weights, tokenizer.model, templates and known towers."""
