"""`card.json`: the configuration that `vtx-fit` chose for a bundle, and the evidence for it.

    card.json          this record, written last
    card.json.sha256   its checksum, and card.json.sig its signature, as those of vtx.json

It is made after the export, so it has a seal of its own, as the engines of vtx-build do. It names the manifest that it
was made for by its SHA-256, so it cannot be taken to another bundle.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vtx.runtime.bundle.bundle import CARD, MANIFEST, Bundle
from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.bundle.seal import SigningKey, read_sealed, write_sealed
from vtx.runtime.bundle.spec.manifest import MAX_BYTES as MAX_MANIFEST
from vtx.runtime.errors import BundleError
from vtx.runtime.strict import UPGRADE, Strict, optional, write_json

FORMAT = "vtx-card-1"
MAX_BYTES = 1 << 20
CHANGED = "change"
LOST = "were right and are wrong now"
CURE = "run vtx-fit again, or remove card.json"
Kind = Literal["yes or no", "choice", "number", "word", "quoted text", "sentence"]
KINDS: tuple[Kind, ...] = ("yes or no", "choice", "number", "word", "quoted text", "sentence")
YES_NO, CHOICE, NUMBER, WORD, TEXT, SENTENCE = KINDS


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds: the median and the 99th percentile of `count` measurements.

    `p99_upper`: the 99th percentile is below it with a confidence of 95%; None of estimates, or if they are too few.
    """

    p50: float
    p99: float
    count: int
    p99_upper: float | None = optional(None)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings of answers: the engine and its arithmetic, K, a spec of reductions or "none", and limits of images.

    `max_tiles` and `max_pixels` as `load` takes them, `rest` as a question does: "10%" or a number of image tokens.
    """

    device: str
    compute: str
    k: int | str | None
    reduce: str
    max_tiles: int | None = optional(None)
    max_pixels: int | None = optional(None)
    rest: str | int | None = optional(None)

    @property
    def name(self) -> str:
        depth = "K by the gates" if self.k == "auto" else f"K = {self.k or 'none'}"
        depth += "" if self.rest is None else f" with a rest of {self.rest}"
        limits = {"tiles": self.max_tiles, "pixels": self.max_pixels}
        parts = [depth, "no reduction" if self.reduce == "none" else self.reduce]
        parts += [f"at most {most:,} {unit} an image" for unit, most in limits.items() if most]
        return ", ".join([*parts, f"{self.compute} on {self.device}"])


@dataclass(frozen=True, slots=True)
class Evidence:
    """The answers and times of a configuration of the bundle named `bundle`, on the questions held out.

    `changed`: the share of answers that differ from the full model's, each image counting the same; `upper`: the upper
    end of its interval, taken by itself. `memory`: predicted bytes. `per_token_ms`: None if no answer had two tokens.
    """

    bundle: str
    configuration: Configuration
    changed: float
    upper: float
    first_token_ms: Times
    per_token_ms: Times | None
    answer_ms: Times
    memory: int


@dataclass(frozen=True, slots=True)
class FittedData:
    """The questions: the file's name, the SHA-256 of their texts and images, and how many were held out."""

    source: str
    sha256: str
    questions: int
    images: int
    held_out_questions: int
    held_out_images: int


@dataclass(frozen=True, slots=True)
class Guarantee:
    """At most `limit` of the answers change, with a confidence of `confidence`, found by `method`.

    Or with another `loss`, at most `limit` were right and are wrong now, so accuracy drops by no more. It accounts for
    the search: `tested` configurations were tested in turn, on questions that chose none of them.
    """

    limit: float
    confidence: float
    method: str
    tested: int
    loss: str = optional(CHANGED)


@dataclass(frozen=True, slots=True)
class KindDepth:
    """The K of one kind of answers, None for no withdrawal, and the share of the image tokens that stays from it on.

    `kept`: the share of the `questions` held out whose answers stay the same, each image counting the same; `low`: the
    lower end of its one-sided 95% interval.
    """

    kind: Kind
    k: int | None
    rest: float
    kept: float
    low: float
    questions: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The threshold of `vtx-eval --coverage`: answers whose probability reaches it are accepted.

    Of `questions` of `source`, asked by `method`, it accepted the share `coverage`, of which `accuracy` was right and
    at least `low` is, with a confidence of 95% that accounts for the search.
    """

    threshold: float
    accuracy: float
    low: float
    coverage: float
    questions: int
    source: str
    method: str


@dataclass(frozen=True, slots=True)
class Card:
    """The choice of `vtx-fit` for the bundle whose `vtx.json` has the SHA-256 `manifest`, its data and its machine.

    `reference` is the full model whose answers count as unchanged. `front`: the configurations that none beats in
    both time and changed answers. `quiet`: times were repeated until they agreed. `planned`: the profile of the device
    that times and memory are estimated for; nothing was measured there, and the answers are those of this machine.
    `kinds`: K by the kind of answer, for K = "card"; a kind that is not there was not measured. `accept`: for answers
    to choices, None if it was not measured.
    """

    format: str
    manifest: str
    chosen: Evidence
    guarantee: Guarantee
    data: FittedData
    reference: str
    max_new_tokens: int
    threads: int
    cpu: str
    system: str
    versions: Mapping[str, str]
    quiet: bool
    front: tuple[Evidence, ...]
    planned: str | None = optional(None)
    kinds: tuple[KindDepth, ...] = optional(())
    accept: Acceptance | None = optional(None)

    @property
    def in_words(self) -> str:
        """One line for people who use the bundle."""
        estimated = "" if self.planned is None else f"; times are estimates for {self.planned}, not measured"
        name = self.chosen.configuration.name
        guarantee = self.guarantee
        limit = f"at most {100 * guarantee.limit:.3g}% of the answers {guarantee.loss}"
        promise = f"{limit} ({guarantee.confidence:.0%} confidence)"
        if f"{self.chosen.bundle}: {name}" == self.reference:
            promise = "the full model, so no answer changes"
        return f"card.json of vtx-fit: {name}; {promise}{estimated}"


def manifest_digest(bundle: Bundle) -> str:
    return hashlib.sha256(bundle.files.read(MANIFEST, MAX_MANIFEST, links=False)).hexdigest()


def read_card(bundle: Bundle) -> Card | None:
    """The card of a bundle, None without one.

    Raises BundleError: it is damaged, was made for another manifest, or is not signed although the bundle must be.
    """
    if not bundle.files.exists(CARD):
        return None
    sealed = dataclasses.replace(bundle.files, cure=CURE + (" (--sign KEY)" if bundle.key else ""))
    try:
        data = parse_json(read_sealed(sealed, CARD, MAX_BYTES, bundle.key), CARD, error=BundleError)
    except ValueError as e:
        raise BundleError(f"{CARD} is damaged ({e}); {CURE}") from e
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise BundleError(f"{CARD} has format {str(data.get('format'))[:40]!r}, this vtx reads {FORMAT}; {UPGRADE}")
    card = Strict(cure=CURE).read(Card, data, CARD)
    if card.manifest != manifest_digest(bundle):
        raise BundleError(f"{CARD} was made for another {MANIFEST} than the one in {bundle.folder}; {CURE}")
    return card


def write_card(folder: Path, card: Card, key: SigningKey | None = None) -> None:
    """Put a card into a bundle; an older one goes first, so that there is never half of one. Raises `OSError`."""
    (folder / CARD).unlink(missing_ok=True)
    write_sealed(folder / CARD, write_json(card).encode(), key)
