"""Building the ONNX graphs: decoder stages, vision tower, gates."""
