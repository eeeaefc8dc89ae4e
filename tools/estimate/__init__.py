"""The cost of a model on a device, before anything is built."""
