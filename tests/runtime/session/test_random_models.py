"""Random configurations of a family against transformers, and at K against the plain statement.

`VTX_CONFIGURATIONS=30 pytest tests/runtime/session/test_random_models.py` compares 30 of each family.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import ORT, export
from tests.support.drawn import (
    any_text,
    glm_ocr,
    lfm3_vl,
    lighton_ocr,
    minicpm,
    mistral3,
    paddleocr_vl,
    paligemma,
    pixtral,
    qwen3_5,
    qwen3_5_moe,
    qwen3_vl_moe,
    qwen_vl,
    smolvlm,
)  # fmt: skip
from tests.support.exact import ExactReference
from tests.support.exported import greedy, prompt
from tests.support.families.fast_vlm import FAST_VLM
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.lfm2_vl import LFM2
from tests.support.families.llava_next import GRANITE
from tests.support.near import assert_near
from tests.support.parity import CLOSE, STEPS, assert_chat_as_reference, assert_later_equal_fresh
from tests.support.reduced import Found, Talk, word
from tests.support.reference import Greedy, Reference
from tests.support.statement import Method, Outcome, Statement
from tests.support.tiny import Tiny, make, prompt_messages, random_image
from vtx.runtime.api.load import load

COUNT = int(os.environ.get("VTX_CONFIGURATIONS", "1"))
QUESTION = "What is the colour of the square in the picture?"
TOLERANCE = 1e-4
ROUNDING = 2  # times the reference's own distance from its answer in float64


def granite(draw: random.Random) -> Tiny:
    layers = draw.randint(3, 5)
    return replace(
        any_text(draw, GRANITE), attention_bias=draw.random() < 0.5, mlp_bias=draw.random() < 0.5, vision_layers=layers,
        feature_layer=tuple(draw.randint(-layers - 1, layers) for _ in range(draw.randint(1, 4))),
        vision_hidden=draw.choice([32, 48]), image=draw.choice([42, 56]),
        multipliers=(draw.uniform(2, 16), draw.uniform(0.02, 0.3), draw.uniform(0.1, 1), draw.uniform(1, 12)),
    )  # fmt: skip


def fast_vlm(draw: random.Random) -> Tiny:
    first, most = draw.choice([4, 8, 16]), draw.choice([32, 64])
    return replace(
        any_text(draw, FAST_VLM), image=64 * draw.randint(1, 4),
        stage_blocks=tuple(draw.randint(1, 3) for _ in range(5)),
        stage_widths=(first, draw.choice([1, 2]) * first, 32, most, draw.choice([1, 2]) * most),
        text=draw.choice(["qwen2", "qwen2", "llama"]), projector_act=draw.choice(["gelu", "silu"]),
    )  # fmt: skip


def lfm2_vl(draw: random.Random) -> Tiny:
    tiny = any_text(draw, LFM2)
    attending = draw.sample(range(tiny.layers), draw.randint(1, tiny.layers - 1))
    return replace(
        tiny, rope="default", head_dim=None, hidden=draw.choice([64, 96]), attending=tuple(sorted(attending)),
        taps=draw.randint(2, 5), attention_bias=draw.random() < 0.4, select=draw.choice(["default", "full"]),
        vision_layers=draw.randint(1, 4), vision_hidden=draw.choice([32, 48]), vision_head=draw.random() < 0.5,
        names=draw.choice(["hub", "saved"]),
    )  # fmt: skip


def gemma3(draw: random.Random) -> Tiny:
    patch, pool, side = draw.choice([8, 14]), draw.randint(1, 4), draw.randint(2, 4)
    return replace(
        any_text(draw, GEMMA3), rope=draw.choice(["default", "linear"]), full_every=draw.randint(1, 5), patch=patch,
        pool=pool, image=patch * pool * side, sliding_window=draw.choice([16, 24, 80, 400]),
        query_scale=draw.choice([8, 16, 24]), vision_layers=draw.randint(1, 4), vision_hidden=draw.choice([32, 48]),
        vision_head=draw.random() < 0.5, theta=draw.choice([1e3, 1e4]),
    )  # fmt: skip


def gemma4(draw: random.Random) -> Tiny:
    every, layers = draw.randint(2, 4), draw.randint(7, 10)
    return replace(
        GEMMA4, layers=layers, full_every=every, shared=draw.randint(0, layers - every - 1), heads=draw.choice([2, 4]),
        kv_heads=draw.choice([1, 2]), head_dim=draw.choice([8, 16]), sliding_window=draw.choice([5, 24, 80, 400]),
        per_layer=draw.choice([8, 16]), softcap=draw.choice([None, 20.0]), clipped=draw.random() < 0.5,
        hidden=draw.choice([48, 64]), ffn=draw.choice([64, 96]), tied=draw.random() < 0.7,
        vision_layers=draw.randint(1, 3), theta=draw.choice([1e3, 1e4]),
    )  # fmt: skip


def of_qwen(draw: random.Random) -> tuple[Method, ...]:
    before = Method(dart=(8, draw.randint(0, 4), 2, 2))
    return Method(fastv=(draw.randint(1, 4), 0.5)), Method(cdpruner=(6, "embedding")), before


FAMILIES = [
    granite, fast_vlm, lfm2_vl, qwen3_5, minicpm, gemma3, gemma4, smolvlm, paligemma, qwen_vl, pixtral, mistral3,
    lighton_ocr, glm_ocr, lfm3_vl, paddleocr_vl, qwen3_vl_moe, qwen3_5_moe,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_configuration_answers_as_transformers_and_at_k_as_the_statement(
    tmp_path: Path, family: Callable[[random.Random], Tiny], seed: int
) -> None:
    draw = random.Random(f"{family.__name__} {seed}")
    tiny = family(draw)
    checkpoint = make(tmp_path / "checkpoint", tiny, seed)
    last = tiny.layers
    if tiny.family == "gemma4":  # layers that share read the last one of either kind
        alone = tiny.layers - tiny.shared
        last = min(alone - alone % tiny.full_every, alone - (alone % tiny.full_every == 0)) if tiny.shared else alone
    ks = sorted(draw.sample(range(2, last + 1), min(3, last - 1)))
    judge = Reference(checkpoint)
    # of Qwen-VL 16 tokens or more: DART leaves out none of fewer
    methods, least = (of_qwen(draw), 112) if family is qwen_vl else ((), 20)
    sizes = [(draw.randint(least, 200), draw.randint(least, 200)) for _ in range(2)]
    images = [random_image(seed + number, size) for number, size in enumerate(sizes)]
    specs, worst, sure = tuple(map(word, methods)), 0.0, 0
    folder = export(checkpoint, tmp_path / "bundle", ks, reductions=specs, dialects=ORT).folder
    exact, over, theirs = ExactReference(checkpoint), 0.0, 0.0
    with load(folder, device="cpu", threads=1) as model:
        for pictures in (images[:1], images):
            messages = prompt_messages(QUESTION, len(pictures))
            inputs, asked = judge.inputs(messages, pictures), prompt(model, messages, pictures)
            assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
            for k in (None, *ks):
                wanted = judge.greedy(inputs, k, STEPS)
                found = greedy(model, asked, k, STEPS, forced=wanted.ids)
                if wanted.margin > CLOSE:
                    sure += 1
                    assert found.ids == wanted.ids
                references = [wanted.logits.numpy()]
                if k is None:
                    ids, logits = judge.generate_hf(inputs, STEPS)
                    assert ids == wanted.ids or wanted.margin < CLOSE
                    references.append(logits.numpy())
                apart = max(float(np.abs(found.logits - each).max()) for each in references)
                if apart >= TOLERANCE:  # a model may be that sensitive to rounding, the reference's too
                    own, *others = from_exact(exact.greedy(inputs, k, STEPS), wanted, found.logits, *references)
                    allowed = max(TOLERANCE, ROUNDING * max(others))
                    assert own < allowed, f"K = {k}: {own:.1e} from float64, transformers {max(others):.1e}"
                    over, theirs = max(over, own), max(theirs, *others)
                else:
                    worst = max(worst, apart)
            for method in methods:
                wanted_of = Statement(judge).answer(inputs, method, STEPS)
                assert_as_stated(Talk(model).ask(messages, pictures, method, STEPS), wanted_of)
        tolerance = TOLERANCE if tiny.text == "qwen3_5" else CLOSE / 2
        if methods or tiny.family == "paligemma":  # chats would use what was exported, or there are none
            return
        assert_later_equal_fresh(model, images[:1], draw.choice([None, *ks]), tolerance=tolerance)
        assert_chat_as_reference(model, judge, images, draw.choice([None, *ks]), tolerance, exact)
    beside = f" ({over:.1e} from float64 where transformers is {theirs:.1e} from it)" if over else ""
    print(f"{family.__name__} {seed}: largest difference {worst:.1e}{beside}, {sure} of {2 * len(ks) + 2} answers sure")


def assert_as_stated(found: Found, wanted: Outcome) -> None:
    """What stays is the statement's, and so are ids and logits up to the first two tokens too close to call."""
    assert found.kept == wanted.kept
    first, second = wanted.logits.topk(2).values.T
    sure = int((first - second > 2 * TOLERANCE).int().cumprod(0).sum())
    assert found.ids[:sure] == wanted.ids[:sure]
    logits = wanted.logits[: sure + 1].numpy()
    assert_near(found.logits[: sure + 1], logits, TOLERANCE)


def from_exact(exact: Greedy, wanted: Greedy, *logits: np.ndarray) -> list[float]:
    """The distance of each of the logits along `wanted.ids` from those in float64, up to another token there."""
    pairs = enumerate(zip(exact.ids, wanted.ids, strict=True))
    end = 1 + next((n for n, pair in pairs if pair[0] != pair[1]), STEPS - 1)
    return [float(np.abs(each[:end] - exact.logits.numpy()[:end]).max()) for each in logits]
