"""Idefics3 and SmolVLM, which is of its kind."""
