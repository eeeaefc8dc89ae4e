"""A bundle beside transformers on the checkpoint's own files, as one row of a table: ok, or what differs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from tests.support.exported import greedy, prompt
from tests.support.published.chats import SINGLE, SIZES, TYPED, chats, turn
from tests.support.published.judge import Judge
from tests.support.published.places import ROOT
from tests.support.tiny import random_image
from vtx.runtime.api.model import Model

RECORDS = ROOT / "build" / "published" / "results"
TOLERANCE = 1e-4
STEPS = 4
OK = "ok"


@dataclass
class Row:
    """What a model's comparison found; `files` are the published ones or those that transformers 5 wrote of them."""

    model: str
    files: str
    export: str = OK
    ids: str = "-"
    image_tokens: str = "-"
    pixels: str = "-"
    logits: str = "-"
    ends: str = "-"

    @property
    def faults(self) -> dict[str, str]:
        """The columns that are neither ok nor left out."""
        return faults_of(asdict(self))

    def record(self) -> None:
        """Keep the row for `python -m tests.support.published.table`."""
        RECORDS.mkdir(parents=True, exist_ok=True)
        file = RECORDS / f"{self.model} {self.files}.json"
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def faults_of(row: dict[str, str]) -> dict[str, str]:
    """The columns of a row that are neither ok nor left out."""
    return {name: text for name, text in row.items() if name not in ("model", "files") and text not in (OK, "-")}


def compare(row: Row, model: Model, judge: Judge) -> None:
    """Fill in the columns of a row."""
    row.ids = _first_fault(_ids_of(model, judge, name) for name in chats())
    images = [random_image(3, size) for size in SIZES]
    first = 1 if judge.kind == "video_llava" else 0  # whose processor takes the one row of 1x1 for colours, and fails
    row.image_tokens, row.pixels = _images(model, judge, images[first:])
    row.logits = _first_fault(_logits(model, judge, picture) for picture in (images[2], images[5], None))
    ends = judge.eos if isinstance(judge.eos, list) else [judge.eos]  # None where no file states one
    row.ends = (
        OK if {*ends} - {None} <= {*model.manifest.text.end_ids} else f"{model.manifest.text.end_ids}, theirs {ends}"
    )


def _first_fault(found: Any) -> str:
    return next((fault for fault in found if fault), OK)


def _asked(model: Model, messages: list[dict[str, Any]], images: list[Image.Image]) -> list[int]:
    pictures = model.loaded.images.prepare_all(images, messages=messages)
    ids: list[int] = model.loaded.text.prompt(messages, [picture.in_prompt for picture in pictures]).tolist()
    return ids


def _ids_of(model: Model, judge: Judge, name: str) -> str:
    messages, images = chats()[name]
    if judge.two_way and name not in SINGLE:
        return ""
    wanted, ids = judge.ids(messages, images), _asked(model, messages, images)
    if name == TYPED:  # which stays text with vtx, and is control tokens with transformers
        return _typed(model, ids, messages, images)
    if ids == wanted:
        return ""
    at = next((n for n, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1]), -1)
    return f"{name}: from {at} on {ids[at : at + 4]}, theirs {wanted[at : at + 4]}"


def _typed(model: Model, ids: list[int], messages: list[dict[str, Any]], images: list[Image.Image]) -> str:
    """Control tokens of a prompt are those of the same prompt with a word in the place of the typed ones."""
    text = messages[0]["content"][-1]["text"]
    plain = [turn("user", "<picture>", "red")]
    added = model.loaded.text.tokenizer.get_added_tokens_decoder()
    special = {id for id, token in added.items() if token.special}
    here, there = ([id for id in found if id in special] for found in (ids, _asked(model, plain, images)))
    if here != there:
        return f"typed tokens are control tokens: {[id for id in here if id not in there]}"
    decoded = model.loaded.text.decode([id for id in ids if id not in special])
    return "" if text in decoded else f"typed tokens are not in {decoded[-60:]!r}"


def _images(model: Model, judge: Judge, images: list[Image.Image]) -> tuple[str, str]:
    counts, pixels = list[str](), list[str]()
    for image in images:
        messages = [turn("user", "<picture>", "What is it?")]
        inputs = judge.inputs(messages, [image])
        wanted = int((inputs["input_ids"][0] == judge.image_token).sum())
        prepared = model.loaded.images.prepare(image)
        ids = _asked(model, messages, [image])
        if prepared.tokens != wanted:
            counts.append(f"{image.size}: {prepared.tokens}, theirs {wanted}")
        elif ids != inputs["input_ids"][0].tolist():
            counts.append(f"{image.size}: text among image tokens differs")
        values = np.sort(np.concatenate([np.ravel(view) for view in prepared.views]))
        theirs = judge.pixels(inputs)
        if values.shape != theirs.shape:
            pixels.append(f"{image.size}: {values.size} values, theirs {theirs.size}")
        elif (most := float(np.abs(values - theirs).max())) > 1e-5:
            pixels.append(f"{image.size}: up to {most:.2g}")
    return "; ".join(counts) or OK, "; ".join(pixels) or OK


def _logits(model: Model, judge: Judge, image: Image.Image | None) -> str:
    """The answer's logits beside transformers', which generates with its own cache."""
    if image is None and judge.two_way:
        return ""
    images = [] if image is None else [image]
    messages = [turn("user", *["<picture>"] * len(images), "What is on the table?")]
    inputs = judge.inputs(messages, images)
    ids, logits = judge.generate_hf(inputs, STEPS)
    answer = greedy(model, prompt(model, messages, images), None, STEPS, forced=ids)
    most = float(np.abs(answer.logits - logits.numpy()).max())
    return "" if most <= TOLERANCE else f"up to {most:.2g} at {image.size if image else 'text'}"
