"""What the tokenizer file does not say about text; stands in the bundle's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vtx.runtime.errors import BundleError


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What the tokenizer file does not say; stands in the bundle's manifest. Raises `BundleError` on wrong values."""

    image_token: str
    image_token_id: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    end_ids: tuple[int, ...]
    """Every id that ends an answer."""
    add_special_tokens: bool
    """Whether the rendered prompt gets what the tokenizer adds (a BOS), unless the template printed the BOS itself."""

    def __post_init__(self) -> None:
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            _require(getattr(self, name) is None or isinstance(getattr(self, name), str), name, "a string or null")
        _require(isinstance(self.image_token, str) and self.image_token != "", "image_token", "a string")
        _require(_is_id(self.image_token_id), "image_token_id", "an id")
        _require(isinstance(self.end_ids, tuple) and all(map(_is_id, self.end_ids)), "end_ids", "a list of ids")
        _require(isinstance(self.add_special_tokens, bool), "add_special_tokens", "true or false")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TextSettings:
        """Settings as the manifest holds them. Raises `BundleError` on unknown, missing or wrong keys."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            found = set(values) if isinstance(values, Mapping) else set()
            raise BundleError(
                f"the manifest's text settings lack {sorted(names - found)} and have {sorted(map(str, found - names))} "
                "that this version does not know; export the bundle again"
            )
        ends = values["end_ids"]
        return cls(**{**values, "end_ids": tuple(ends) if isinstance(ends, (list, tuple)) else ends})

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        return {**asdict(self), "end_ids": list(self.end_ids)}

    def variables(self) -> dict[str, str]:
        """The special tokens by the names that templates use."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _require(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise BundleError(f"the manifest's text settings: {name} must be {wanted}; export the bundle again")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
