"""Gemma 4: sliding windows, layers that share keys and values, inputs to each layer, and its tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.bundles import ORT, export
from tests.support.exported import THREADS, greedy, prompt
from tests.support.families.gemma import GEMMA4, settings
from tests.support.fixtures import Checkpoints, References
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.checkpoint.families.gemma.gemma4 import FAMILY
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.runtime.api.load import load
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError
from vtx.tools.model.decoder import PER_LAYER


def test_the_graph_of_images_reads_one_row_of_the_table_of_inputs_to_layers(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """E2B's table is 4.7 GB, which an engine would read and widen to gather a row while it loads."""
    folder = export(tiny_checkpoint(GEMMA4), tmp_path / "bundle", (4,)).folder
    tables = [
        each
        for graph in folder.glob("vision.*.onnx")
        for each in onnx.load(graph, load_external_data=False).graph.initializer
        if each.name.startswith(PER_LAYER)
    ]
    assert len(tables) == len([*folder.glob("vision.*.onnx")]) > 1
    for table in tables:
        assert list(table.dims) == [1, GEMMA4.layers * GEMMA4.per_layer]


def test_a_smaller_budget_of_tokens_is_chosen_at_run_time(
    tiny_checkpoint: Checkpoints, reference: References, tmp_path: Path
) -> None:
    tiny = replace(GEMMA4, budget=140)
    folder, judge = export(tiny_checkpoint(tiny), tmp_path / "bundle", (4,), dialects=ORT).folder, reference(tiny)
    messages, pictures = prompt_messages(QUESTIONS[0]), [random_image(2, (100, 60))]
    seen = []
    for budget in (140, 70):
        judge.processor.image_processor.max_soft_tokens = budget
        inputs = judge.inputs(messages, pictures)
        with load(folder, device="cpu", threads=THREADS, max_pixels=budget * 48**2) as model:
            for k in (None, 4):
                found = greedy(model, prompt(model, messages, pictures), k, 1)
                wanted = judge.greedy(inputs, k, 1)
                assert_near(found.logits, wanted.logits, 1e-4)
        seen.append(found.done.vision_tokens)
    assert seen == [135, 60]


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("text_config", {"enable_moe_block": True}, UnsupportedModelError, "enable_moe_block"),
    ("text_config", {"attention_k_eq_v": True}, UnsupportedModelError, "attention_k_eq_v"),
    ("text_config", {"use_bidirectional_attention": "vision"}, UnsupportedModelError, "use_bidirectional_attention"),
    ("text_config", {"layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
    ("text_config", {"layer_types": ["linear_attention"] * 9}, CheckpointError, "linear_attention"),
    ("text_config", {"layer_types": ["sliding_attention"] * 9}, Exception, "full_attention|all layers slide"),
    ("text_config", {"num_kv_shared_layers": 9}, CheckpointError, "num_kv_shared_layers"),
    ("text_config", {"num_kv_shared_layers": 8}, CheckpointError, "none of the 1 before"),
    ("text_config", {"sliding_window": None}, CheckpointError, "sliding_window"),
    ("text_config", {"vocab_size_per_layer_input": 300}, UnsupportedModelError, "vocab_size_per_layer_input"),
    ("text_config", {"pad_token_id": 320}, CheckpointError, "pad_token_id"),
    ("vision_config", {"num_key_value_heads": 1}, UnsupportedModelError, "num_key_value_heads"),
    ("", {"image_token_id": 320}, CheckpointError, "320 is not a token id"),
]


@pytest.mark.parametrize(("part", "changes", "error", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_not_built_or_does_not_fit_is_refused_by_name(
    part: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = settings(GEMMA4, 319)
    (config[part] if part else config).update(changes)
    with pytest.raises(error, match=message):
        read_config(config)


@pytest.mark.parametrize("budget", [71, 10_000, "all"])
def test_an_image_processor_with_another_budget_is_refused(budget: Any) -> None:
    assert FAMILY.adjust is not None
    with pytest.raises(CheckpointError, match="max_soft_tokens"):
        FAMILY.adjust(read_config(settings(GEMMA4, 319)), {"max_soft_tokens": budget})


def test_more_patches_than_positions_are_refused() -> None:
    assert FAMILY.adjust is not None
    with pytest.raises(CheckpointError, match="the tower has 256 positions; lower max_soft_tokens"):
        FAMILY.adjust(read_config(settings(GEMMA4, 319)), {"max_soft_tokens": 280})


@pytest.mark.parametrize("k", [6, 7])  # layers 7 to 9 read keys and values of 5 and 6
def test_a_withdrawal_that_layers_behind_would_not_follow_is_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path, k: int
) -> None:
    with pytest.raises(
        RequestError, match=f"K = {k} is behind layer 5: layers from 7 on .* name K from 2 to 5, or none"
    ):
        export(tiny_checkpoint(GEMMA4), tmp_path / "bundle", (k,))
    with pytest.raises(
        UnsupportedModelError, match=r"after layer 5, but .* from 7 on would still see them in K and V of"
    ):
        export(tiny_checkpoint(GEMMA4), tmp_path / "bundle", (), reductions=("dart:keep=8,k=5",))
