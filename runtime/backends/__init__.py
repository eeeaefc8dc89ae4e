"""Backends that compute a bundle's graphs: one for each engine, behind one interface, and the choice of one."""
