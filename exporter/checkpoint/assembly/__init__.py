"""A model as it is opened: one checkpoint, or several that belong together."""
