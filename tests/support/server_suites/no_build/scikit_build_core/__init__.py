"""Instead of a package's build backend: pip asks for metadata of what it only downloads."""
