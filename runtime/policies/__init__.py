"""Policies: which image tokens go on, decided between two stages. One file a method, in `methods/`.

A method that drops some image tokens is a `Reduction`, registered under its name by `@reduction("name")`; every file in
`methods/` is read when a spec is parsed. `make_policy` puts together what a question is asked with.
"""

from vtx.runtime.policies.base import Boundary, Entry, Needs, PromptText, Reduction, reduction
from vtx.runtime.policies.options import Not, option
from vtx.runtime.policies.spec import parse, to_spec

__all__ = ["Boundary", "Entry", "Needs", "Not", "PromptText", "Reduction", "option", "parse", "reduction", "to_spec"]
