"""Policies: who says, between two stages, which vision rows go on. One file a method, in `methods/`.

A method that leaves out rows is a `Reduction`, registered under its word by `@reduction("word")`; every file in
`methods/` is read when words are parsed. `make_policy` puts together what a question is asked with.
"""

from vtx.runtime.policies.base import Boundary, Entry, Needs, Reduction
from vtx.runtime.policies.spec import parse, reduction, word

__all__ = ["Boundary", "Entry", "Needs", "Reduction", "parse", "reduction", "word"]
