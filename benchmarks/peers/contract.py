"""What passes between the harness and a rival's process, and what a rival's file must offer.

Rivals run in environments of their own, without vtx: this file needs the standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Precision:
    """A contender's word for how it computes, as in "int8", "int8@openvino" or "int8@openvino/9".

    `stored` is what its checkpoint is converted to, `engine` what it runs on ("": the rival's own), with a `+` also in
    which arithmetic, `k` the first layer without the image (None: all layers see it). Only vtx has engines and K. With
    the engine AUTO every rival is converted and run without any option but the precision.
    """

    stored: str
    engine: str
    k: int | None

    @classmethod
    def parse(cls, word: str) -> Precision:
        """Raises ValueError where K is not a number."""
        place, slash, k = word.partition("/")
        stored, _, engine = place.partition("@")
        return cls(stored, engine, int(k) if slash else None)

    @property
    def installed(self) -> bool:
        """True for a contender without any option but the precision."""
        return self.engine == AUTO


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt: the image's file, what is asked, the text that the chat template prints, and the ids of it all.

    `ids` hold the image token once for every row of the image; the first `front` of them, the last image token
    included, are the same in every question about the image.
    """

    image: str
    asked: str
    text: str
    ids: tuple[int, ...]
    image_token: int
    front: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids and the moments, in seconds from the question, at which each was there.

    `vision` are the seconds of tower and projector, None where the rival does not say.
    """

    ids: tuple[int, ...]
    moments: tuple[float, ...]
    vision: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What one process is to do: load, warm up with `warm`, then answer `first` and `second` on one image."""

    folder: str
    precision: str
    threads: int
    new_tokens: int
    warm: Question
    first: Question
    second: Question

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        values = json.loads(text)
        for name in ("warm", "first", "second"):
            values[name] = Question(**{**values[name], "ids": tuple(values[name]["ids"])})
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Result:
    """What one process measured: milliseconds, MiB, and the ids of the first question's answer.

    `cold` is the first token of the process's first question, `first` that of a question after it about a new image,
    `second` that of one more about the same image; `decode` is the mean time of one token after the first. `how`: the
    engine and the arithmetic, where the rival says which it chose.
    """

    load: float
    cold: float
    first: float
    decode: float
    second: float
    rss: float
    vision: float | None
    ids: tuple[int, ...]
    versions: dict[str, str] = field(default_factory=dict)
    how: str = ""

    def in_words(self) -> str:
        return (
            f"first token {self.first / 1000:.2f} s, {self.decode:.1f} ms a token, "
            f"second question {self.second / 1000:.2f} s"
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        return cls(**{**values, "ids": tuple(values["ids"])})


class Model(Protocol):
    """A loaded model; it may keep what it knows of the last image, as the rival itself would. `how`: as in `Result`."""

    def ask(self, question: Question, new_tokens: int) -> Answer:
        """Greedy, end tokens ignored, `new_tokens` ids."""
        ...


class Rival(Protocol):
    """A module in `rivals/`. Its libraries are imported inside its functions.

    REQUIREMENTS are pip's arguments, a tuple a call; empty: this environment serves. TORCH stands for the torch that
    the user chose. PACKAGES are those whose versions are shown. NOTE says how its workload differs, where it does.
    SAME_AS, where it has one, names the rival whose environment and conversion it uses.
    """

    PRECISIONS: tuple[str, ...]
    REQUIREMENTS: tuple[tuple[str, ...], ...]
    PACKAGES: tuple[str, ...]
    NOTE: str

    def prepare(self, checkpoint: Path, precision: str, folder: Path) -> None:
        """Write what `load` needs into `folder`, which is there and empty.

        `precision` is the stored one alone or with "@auto", for vtx followed by the K to be prebuilt, as in "int8/9",
        "int8/5,9" or "int8@auto/9".
        """
        ...

    def load(self, folder: Path, precision: str, threads: int) -> Model: ...


TORCH = "TORCH"
