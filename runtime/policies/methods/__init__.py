"""One file per method. Every file here is imported when a reduction spec is parsed, which registers its method."""
