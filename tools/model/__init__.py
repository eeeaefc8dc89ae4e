"""The parts of a model: each states its tensors and its work, from which graphs, plans and estimates are made."""
