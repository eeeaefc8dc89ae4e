"""What computes a bundle's graphs: one backend an engine, behind one interface, and which of them to take."""
