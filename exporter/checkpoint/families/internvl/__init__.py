"""InternVL, in Hugging Face's layout and its authors'."""
