"""Model families, one file each: what a checkpoint of theirs says, and how an image becomes tokens."""
