"""Ways to spend less on image tokens: withdrawals and reductions, their names, and those that a bundle offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.policies import Reduction, parse, to_spec
from vtx.runtime.vision.layouts import read_layout
from vtx.tools.bench.measure import K

NONE = "none"
RANDOM = "random:keep=0.25", "random:keep=0.5"


@dataclass(frozen=True, slots=True)
class Method:
    """A withdrawal (`k`) to a `rest`, reductions before it (`reduce`, a canonical spec), both, or neither."""

    k: K
    reduce: str = NONE
    rest: str | None = None

    @property
    def name(self) -> str:
        depth = [] if self.k is None else ["gates" if self.k == "auto" else f"K = {self.k}"]
        depth += [] if self.rest is None else [f"rest {self.rest}"]
        return " + ".join([*map(short, parse(self.reduce)), *depth]) or NONE

    @property
    def key(self) -> str:
        """Its settings, as journals of answers have them."""
        return f"k={self.k} reduce={self.reduce}" + ("" if self.rest is None else f" rest={self.rest}")

    @property
    def kind(self) -> str:
        if self.reduce == NONE:
            return "gates" if self.k == "auto" else "withdrawal"
        return "pruning" if self.k is None else "both"


def find_methods(manifest: Manifest, ks: Sequence[K]) -> tuple[Method, ...]:
    """No method, each of `ks`, each exported reduction, and each of these followed by one withdrawal.

    Tokens drawn at random stand beside them, where the model's layout allows it: a method that does not beat these is
    worth nothing.
    """
    specs = [spec for spec in manifest.reductions if spec != NONE]
    k = _one_k(manifest, ks)
    methods = [Method(None), *(Method(k) for k in ks if k is not None), *(Method(None, spec) for spec in specs)]
    if k is not None:
        methods += [Method(k, spec) for spec in specs]
    alone = not specs and not any(ks)
    among_text = read_layout(manifest.layout, manifest.model.tower).has_text
    if not alone and not among_text and not any("random" in spec for spec in specs):
        methods += [Method(None, to_spec(parse(spec))) for spec in RANDOM]
    return tuple(methods)


def _one_k(manifest: Manifest, ks: Sequence[K]) -> int | None:
    """The K that follows each reduction: the bundle's default if it is among `ks`, else the middle one of these."""
    fixed = [k for k in ks if isinstance(k, int)]
    if manifest.default_k in fixed:
        return manifest.default_k
    return fixed[len(fixed) // 2] if fixed else None


def short(part: Reduction) -> str:
    """A reduction's spec for tables: its preset, or what is not the default; thresholds, shares, `k` always."""
    values = _options(part)
    defaults = _options(type(part)())
    always = [key for key in values if key == "k" or isinstance(getattr(part, key), float)]
    keys = [key for key in values if values[key] != defaults[key] or key in always]
    start = []
    for name, preset in part.presets.items():
        if all(getattr(part, key) == value for key, value in preset.items()):
            start = [name]
            keys = [key for key in values if values[key] != defaults[key] and key not in preset]
            break
    return f"{part.name}:{','.join([*start, *(f'{key}={values[key]}' for key in keys)])}"


def _options(part: Reduction) -> dict[str, str]:
    """A reduction's options as its canonical spec writes them."""
    return dict(item.split("=") for item in to_spec((part,)).partition(":")[2].split(","))
