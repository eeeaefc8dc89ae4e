"""TensorRT engines: the graphs that a release reads, and building engines from them one at a time."""
