"""Stages of libvtx on OpenVINO: the hidden states of the Python runtime there, in as many runs, over as many rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.bundles import export_with
from tests.support.cabi import Loaded
from tests.support.cpp import needs_cpp, needs_openvino, output, run, write_pictures
from tests.support.fixtures import Checkpoints
from tests.support.near import assert_near
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.backends.devices import missing_instructions
from vtx.runtime.backends.openvino import backend as engine
from vtx.runtime.backends.openvino.cache import FEW
from vtx.runtime.bundle.bundle import seal_manifest
from vtx.runtime.vision.tokens import TokenStates

pytestmark = [needs_cpp, needs_openvino]

ROWS, SAME = 600, 1e-5
Hidden = NDArray[np.float32]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """int4 in blocks of 128, which run in parts of at most 256 rows."""
    checkpoint = tiny_checkpoint(Tiny(hidden=256, ffn=384, heads=4, head_dim=64, context=700))
    options = ExportOptions(str(checkpoint), (3,), "int4", int4_block=128, dialects=("ort", "plain"))
    return export_with(options, tmp_path_factory.mktemp("cpp-openvino") / "bundle").folder


@pytest.fixture(scope="module")
def hidden() -> Hidden:
    return np.random.default_rng(5).standard_normal((ROWS, 256), np.float32)


def in_cpp(bundle: Path, hidden: Hidden, *asked: int, compute: str = "f32") -> Hidden:
    """What stage 1 gives for these rows, then for the last of them as the next token."""
    found = output("probe", "stage", bundle, f"openvino:{compute}", "1", *map(str, asked), stdin=hidden.tobytes())
    return np.frombuffer(found, np.float32).reshape(-1, hidden.shape[1])


def in_python(bundle: Path, hidden: Hidden, compute: str = "f32", device: str = "openvino") -> Hidden:
    count = len(hidden)
    with load(bundle, device=device, compute=compute, threads=1) as model:
        cache = model.backend.stage(1, count + 1)
        found = [
            cache.append(TokenStates(hidden), np.arange(count)).copy(),
            cache.append(TokenStates(hidden[-1:]), np.arange(count, count + 1)).copy(),
        ]
    return np.concatenate(found)


@pytest.fixture(scope="module")
def whole(bundle: Path, hidden: Hidden) -> Hidden:
    return in_cpp(bundle, hidden)


def test_zero_points_of_four_bits_are_read_as_python_reads_them(
    tiny_checkpoint: Checkpoints, tmp_path: Path, hidden: Hidden
) -> None:
    checkpoint = tiny_checkpoint(Tiny(hidden=256, ffn=384, heads=4, head_dim=64, context=700))
    options = ExportOptions(str(checkpoint), (3,), "int4", int4_block=32, dialects=("ort", "plain"))
    folder = export_with(options, tmp_path / "bundle").folder
    assert_near(in_cpp(folder, hidden[:64]), in_python(folder, hidden[:64]), SAME)
    found = np.frombuffer(output("probe", "stage", folder, "cpu", "1", stdin=hidden[:64].tobytes()), np.float32)
    assert_near(found.reshape(-1, 256), in_python(folder, hidden[:64], device="cpu"), SAME)


def test_int4_in_blocks_of_128_and_in_three_runs_computes_what_python_does_in_one(
    bundle: Path, hidden: Hidden, whole: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.most_tokens("int4", "f32") == 256
    monkeypatch.setattr(engine, "most_tokens", lambda *_: None)
    assert_near(whole, in_python(bundle, hidden), SAME)


def test_int8_in_blocks_of_64_multiplies_integers_as_python_does(
    tiny_checkpoint: Checkpoints, tmp_path: Path, hidden: Hidden
) -> None:
    checkpoint = tiny_checkpoint(Tiny(hidden=256, ffn=384, heads=4, head_dim=64, context=700))
    options = ExportOptions(str(checkpoint), (3,), "int8", int8_block=64, dialects=("ort", "plain"))
    folder = export_with(options, tmp_path / "bundle").folder
    assert_near(in_cpp(folder, hidden[:100]), in_python(folder, hidden[:100]), SAME)


def test_hidden_states_share_a_scale_with_as_many_as_weights_do(
    bundle: Path, hidden: Hidden, whole: Hidden, monkeypatch: pytest.MonkeyPatch,
    needs_arithmetic: Callable[[str], None],
) -> None:  # fmt: skip
    needs_arithmetic("int8")  # without its instructions the engine rounds none in float32 either
    monkeypatch.setattr(engine, "weight_block", lambda _: 64)
    assert np.abs(whole - in_python(bundle, hidden)).max() > 100 * SAME, "the group of activations cannot be told"


@pytest.mark.parametrize("count", [2, FEW, FEW + 1, 100])
def test_int4_multiplies_integers_as_python_does_by_the_number_of_tokens(
    bundle: Path, hidden: Hidden, whole: Hidden, count: int, needs_arithmetic: Callable[[str], None]
) -> None:
    """Few tokens multiply by int4, many by the same weights in int8; one more comes behind them."""
    needs_arithmetic("int8")
    found = in_cpp(bundle, hidden[:count], compute="int8")
    assert_near(found, in_python(bundle, hidden[:count], "int8"), SAME)
    differs = np.abs(found[:count] - whole[:count]).max()
    assert differs > 100 * SAME if count > FEW else differs < SAME


def test_without_room_for_weights_in_int8_the_folder_is_named(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_arithmetic: Callable[[str], None]
) -> None:
    needs_arithmetic("int8")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    done = run("probe", "stage", bundle, "openvino:int8", "1")
    assert done.returncode == 1
    assert b"none cannot take the weights in int8 (No such file or directory); set TMPDIR" in done.stderr


def test_rows_that_nobody_asks_for_fill_their_slots_alone(bundle: Path, hidden: Hidden, whole: Hidden) -> None:
    """In three runs, of which the middle one is asked for nothing."""
    asked = 0, 3, 199, 400, 599
    assert_near(in_cpp(bundle, hidden, *asked), whole[[*asked, ROWS]], SAME)


@pytest.mark.slow
def test_questions_at_one_k_after_another_reuse_and_answer_as_in_python(bundle: Path, tmp_path: Path) -> None:
    questions = ("red?", "What is it?", "Where is the circle?", "red?")
    ks = ("3", "3", "none", "3")
    [picture] = write_pictures(tmp_path, [(60, 60)])
    other = Loaded(bundle, "openvino")
    found = other.ask([picture], questions, ks, max_new_tokens=4)
    other.close()
    with load(bundle, device="openvino", threads=1) as model, model.open(picture) as conversation:
        for question, k, answer in zip(questions, ks, found, strict=True):
            want = conversation.ask(question, int(k) if k.isdigit() else k, max_new_tokens=4)
            assert facts(answer) == facts(want.to_dict()), (k, question)
    assert [answer["reused_layers"] for answer in found] == [0, 2, 0, 2]


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    """Of an answer what two runtimes must have in common."""
    told: dict[str, Any] = json.loads(json.dumps(answer))
    same = "token_ids", "k", "kv_slots", "vision_tokens_kept", "reused_image", "reused_layers", "reused_tokens"
    return {key: told[key] for key in same}


def test_keys_of_8_bits_are_brought_to_one_range_as_by_python(
    tiny_checkpoint: Checkpoints, tmp_path: Path, hidden: Hidden
) -> None:
    checkpoint = tiny_checkpoint(Tiny(text="qwen2", hidden=256, ffn=384, heads=4, head_dim=64, context=700))
    options = ExportOptions(str(checkpoint), (3,), "fp32", kv_precision="int8", dialects=("ort", "plain"))
    folder = export_with(options, tmp_path / "bundle").folder
    found = in_cpp(folder, hidden[:100])
    assert_near(found, in_python(folder, hidden[:100]), SAME)


@pytest.mark.parametrize("compute", ["int8", "bf16"])
def test_arithmetic_without_instructions_is_refused_as_in_python(bundle: Path, compute: str) -> None:
    reason = missing_instructions(compute)
    done = run("probe", "stage", bundle, f"openvino:{compute}", "1", stdin=np.zeros((1, 256), np.float32).tobytes())
    assert done.returncode == (0 if reason is None else 1)
    assert (reason or "") in done.stderr.decode()


@pytest.mark.parametrize("kept", [(), ("bf16",), ("bf16", "int8")])
def test_both_runtimes_use_the_same_arithmetic_by_default(
    kept: tuple[str, ...], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Whatever the processor here has instructions for."""
    options = ExportOptions(str(tiny_checkpoint(Tiny())), (2,), "int8", dialects=("ort", "plain"))
    made = export_with(options, tmp_path / "bundle")
    seal_manifest(made.folder, replace(made.manifest, arithmetic=kept))
    picture = write_pictures(tmp_path, [(64, 64)])[0]
    words = ("--bundle", made.folder, "--device", "openvino", "--json", "--max-new-tokens", "2", picture, "red?")
    with load(made.folder, device="openvino", threads=1) as model:
        assert json.loads(output("run", *words))["compute"] == model.backend.compute
