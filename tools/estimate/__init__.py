"""What a model will cost on a device, before anything is built."""
