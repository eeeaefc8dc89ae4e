"""Settings of text that the tokenizer file lacks, the section `text` of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vtx.runtime.errors import BundleError
from vtx.runtime.strict import optional

ROLES = ("system", "user", "assistant")
MAX_ID = (1 << 24) - 1
MAX_PATTERN, COORDINATES = 128, 4  # characters of a box, and numbers


@dataclass(frozen=True, slots=True)
class ExampleTurn:
    """A message of an example: its texts in their order, null for an image."""

    role: str
    parts: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A conversation to be answered, and the text that the export's Jinja made of it, the date being `EXAMPLE_TIME`.

    libvtx has another engine for chat templates, and renders none that differs in an example.
    """

    turns: tuple[ExampleTurn, ...]
    text: str


@dataclass(frozen=True, slots=True)
class LengthBound:
    """The most characters of any token, counted after the normalizer if `normalized`."""

    characters_per_token: int
    normalized: bool

    def __post_init__(self) -> None:
        _require(0 < self.characters_per_token <= MAX_ID, "length_bound", "at least 1")


@dataclass(frozen=True, slots=True)
class BoxForm:
    """The way in which answers write a box: in `pattern`, # is a number and a blank any number of blanks.

    Coordinates are x before y, unless `rows_first`, and of `scale` in width and height of the picture; null: pixels of
    the picture as the model sees it. `label`: it stands before or after a box, or inside of its JSON object.
    """

    pattern: str
    label: Literal["before", "after", "inside"]
    scale: int | None
    rows_first: bool

    def __post_init__(self) -> None:
        valid = len(self.pattern) <= MAX_PATTERN and self.pattern.count("#") == COORDINATES
        _require(valid and self.pattern[:1] not in ("#", " "), "boxes.pattern", "four numbers behind another character")
        _require(self.scale is None or 0 < self.scale <= MAX_ID, "boxes.scale", "at least 1")


@dataclass(frozen=True, slots=True)
class TextSettings:
    """The way from text to token ids, in addition to tokenizer.json. Raises `BundleError` on wrong values."""

    image_token: str
    image_token_id: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    end_ids: tuple[int, ...]
    """Every id that ends an answer."""
    add_special_tokens: bool
    """The rendered prompt gets the additions of the tokenizer (a BOS), unless the template printed the BOS itself."""
    ids_before: tuple[int, ...]
    """The ids that the tokenizer adds before a prompt."""
    ids_after: tuple[int, ...]
    """The ids that the tokenizer adds after a prompt."""
    control_tokens: Mapping[str, int]
    """The tokens that only the template may write, by their text; in a message they are ordinary text."""
    length_bound: LengthBound | None
    """The most text of a token; null if there is no bound."""
    examples: tuple[PromptExample, ...]
    """Conversations as the chat template renders them."""
    video_token: str | None = optional(None)
    """The template's token for a video, the image token if its frames are images; null if it takes none."""
    video_token_id: int | None = optional(None)
    seg_token_id: int | None = optional(None)
    """The token of a segment of the image; answers include the state that chose it. Null: there is none."""

    boxes: BoxForm | None = optional(None)
    """The form of boxes in answers; null: the model has none that its authors state."""

    def __post_init__(self) -> None:
        _require(bool(self.image_token), "image_token", "a string of at least one character")
        for name in ("image_token_id", "video_token_id", "seg_token_id"):
            _require(_are_ids(getattr(self, name) or 0), name, "an id")
        for name in ("end_ids", "ids_before", "ids_after"):
            _require(_are_ids(*getattr(self, name)), name, "a list of ids")
        _require(_are_ids(*self.control_tokens.values()), "control_tokens", "ids by text")
        shared = (self.video_token_id == self.image_token_id) == (self.video_token == self.image_token)
        valid = self.video_token is None if self.video_token_id is None else self.video_token is not None and shared
        _require(valid, "video_token_id", "the id of video_token, as of image_token if that is it, or null")

    def variables(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token", "video_token")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _require(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise BundleError(f"the manifest's text settings: {name} must be {wanted}; export the bundle again")


def _are_ids(*values: int) -> bool:
    return all(0 <= value <= MAX_ID for value in values)
