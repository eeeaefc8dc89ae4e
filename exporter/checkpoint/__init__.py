"""Reading Hugging Face checkpoints: files, configuration, image processor, tokenizer and chat template."""
