"""Tensors in files: safetensors, and what bundles keep in them beside the weights."""
