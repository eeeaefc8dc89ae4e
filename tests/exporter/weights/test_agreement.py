"""A checkpoint whose weights are not what its configuration says."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.exported import prompt
from tests.support.exporting import plan, run
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.parity import assert_parity
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.api.load import load

HEAD, TABLE = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"


def tied(source: Path, folder: Path, *, same: bool) -> Path:
    """A copy of a checkpoint whose configuration ties a head that the weights hold as well."""
    shutil.copytree(source, folder)
    settings = read_json(folder / "config.json")
    write_json(folder / "config.json", settings | {"tie_word_embeddings": True})
    weights = load_file(folder / "model.safetensors")
    save_file(weights | ({HEAD: weights[TABLE].copy()} if same else {}), folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_head_of_its_own_is_exported_though_the_configuration_ties_it(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    planned = plan(tied(tiny_checkpoint(), tmp_path / "c", same=False), (3, 5))
    assert [line for line in planned.warnings if "ties the head" in line]
    run(planned, tmp_path / "b")
    judge = Reference(tmp_path / "c")
    if judge.model.lm_head.weight is judge.decoder.embed_tokens.weight:
        pytest.skip("this release of transformers ties the head whatever the weights hold")
    model = load(tmp_path / "b", device="cpu", threads=1)
    messages, images = prompt_messages("How many circle shapes are there?"), [random_image(1)]
    assert_parity(model, judge, judge.inputs(messages, images), prompt(model, messages, images))


def test_a_head_that_equals_the_embeddings_is_stored_once(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    planned = plan(tied(tiny_checkpoint(), tmp_path / "c", same=True))
    assert "head.weight" not in planned.weights.stored
    assert planned.warnings == ()


def test_weights_that_the_configuration_does_not_know_are_told(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint(Tiny()), tmp_path / "c")
    weights = load_file(folder / "model.safetensors")
    layer = "language_model.model.layers.0.self_attn"
    more = {f"{layer}.q_proj.bias": np.ones(64, np.float32), f"{layer}.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    (warning,) = plan(folder).warnings
    assert "does not account for text.layers.0.self_attn.q_proj.bias (1 in total)" in warning
