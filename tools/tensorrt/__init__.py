"""TensorRT engines: which graphs a release reads, and building engines from them one at a time."""
