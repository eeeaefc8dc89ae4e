"""Small checkpoints made of published files: real configurations, templates and tokenizers, random small weights."""
