"""What a family of models declares."""
