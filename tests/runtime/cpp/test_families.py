"""Families of models: libvtx sees the pixels that Python sees, and answers as Python does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bundles import ORT, export
from tests.support.cpp import TILED, assert_answers_equal, assert_prepared_equal, needs_cpp, write_pictures
from tests.support.families.fast_vlm import FAST_VLM
from tests.support.families.internvl_chat import INTERNLM
from tests.support.families.internvl_chat_1 import INTERNVL_CHAT_1, with_internvit
from tests.support.families.lisa import LISA
from tests.support.families.llava_next import GRANITE
from tests.support.families.original import ANYRES, PAD
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.smolvlm import IDEFICS, SMOLVLM
from tests.support.families.videos import NEXT_VIDEO
from tests.support.families.vila import VILA
from tests.support.tiny import Tiny
from vtx.exporter.checkpoint.families.registry import FAMILIES as REGISTERED
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

pytestmark = needs_cpp

QUESTIONS = ("What is  the picture?", "red?")
SIZES = ((60, 60), (150, 60), (40, 90))
FAMILIES = {
    "vila": VILA,
    "llava_llama, pickled": PAD,
    "llava_mistral, anyres": ANYRES,
    "qwen3": Tiny(text="qwen3", attention_bias=True, head_dim=24),
    "vipllava": Tiny(family="vipllava", feature_layer=(-1, -2)),
    "internvl-chat 1.0": INTERNVL_CHAT_1,
    "internvl-chat": INTERNLM,
    "llava_next_video": NEXT_VIDEO,
    "granite vision": GRANITE,
    "fastvlm": FAST_VLM,
    "paligemma": PALIGEMMA,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("pictures"), SIZES)


@pytest.fixture(scope="module")
def made(
    models: Callable[..., Model], tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Tiny], Model]:
    """The bundle of a family at K = 3."""

    def make(tiny: Tiny) -> Model:
        if tiny is not INTERNVL_CHAT_1:
            return models(tiny, (3,))
        folder = tmp_path_factory.mktemp("internvl-chat")
        checkpoint = Path(shutil.copytree(tiny_checkpoint(tiny), folder / "checkpoint"))
        with_internvit(checkpoint)
        return load(export(checkpoint, folder / "bundle", (3,), dialects=ORT).folder, device="cpu", threads=1)

    return make


def test_every_family_is_compared_here_or_where_images_have_tiles() -> None:
    here = {tiny.family for tiny in (*FAMILIES.values(), LISA, SMOLVLM, IDEFICS)}  # test_segments, test_marked
    here |= {"pi0", "openvla"}  # test_acting, test_token_acting
    here |= {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}  # test_native
    here |= {"lfm2_vl", "qwen3_5", "minicpmv4_6"}  # test_states
    here |= {"gemma3", "gemma4"}  # test_gemma
    here |= {"eagle_llama"}  # test_joined
    assert {family.model_type for family in REGISTERED} == here | {tiny.family for tiny in TILED}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_and_answers_are_those_of_python(
    made: Callable[[Tiny], Model], pictures: list[Path], family: str
) -> None:
    model = made(FAMILIES[family])
    assert_prepared_equal(model, pictures)
    assert_answers_equal(model, pictures, QUESTIONS, ("none", 3, 3))
