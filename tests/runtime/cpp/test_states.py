"""Layers that keep a state: libvtx answers for LFM2-VL, Qwen3.5 and MiniCPM-V 4.6 as Python does."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cabi import Loaded
from tests.support.cpp import DEVICES, needs_abi, needs_cpp
from tests.support.exported import Models
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.lfm3_vl import LFM3
from tests.support.families.minicpm import MINICPM
from tests.support.families.qwen import QWEN35
from tests.support.tiny import Tiny
from vtx.runtime.api.load import load

pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]

FINE = replace(MINICPM, downsample="4x", numbered=False)
MADE = {"lfm2_vl": LFM2, "lfm3_vl": LFM3, "qwen3_5": QWEN35, "minicpmv4_6": MINICPM, "minicpmv4_6, 4x": FINE}
FAMILIES = pytest.mark.parametrize("tiny", MADE.values(), ids=MADE)
SIZES = (60, 60), (150, 60)
QUESTIONS = ("red?", "How many circle shapes are there?", "red?")


@pytest.mark.sampled(5)
@needs_abi
@DEVICES
@FAMILIES
@pytest.mark.parametrize("ks", [(2,), (4, 5)], ids=str)
def test_stages_of_one_layer_answer_as_fresh_ones_on_onnxruntime(
    models: Models, pictures: list[Path], tiny: Tiny, device: str, ks: tuple[int, ...]
) -> None:
    """The first run of prompts of each length, and later ones."""
    folder = models(tiny, ks).bundle.folder
    with closing(Loaded(folder, device)) as loaded, load(folder, device="cpu", threads=1) as fresh:
        for picture, k in itertools.product(pictures, (None, *ks)):
            found = loaded.ask([picture], QUESTIONS, [str(k or "none")] * len(QUESTIONS), max_new_tokens=6)
            for question, answer in zip(QUESTIONS, found, strict=True):
                with fresh.open(picture) as conversation:
                    want = conversation.ask(question, k, max_new_tokens=6)
                assert tuple(answer["token_ids"]) == want.token_ids, (picture.name, k, question)
