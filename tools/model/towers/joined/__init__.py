"""Eagle-X5's towers over one picture, whose features are joined: a file each."""
