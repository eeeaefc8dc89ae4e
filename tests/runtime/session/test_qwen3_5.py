"""Qwen3.5: layers with the gated delta rule, whose states are large, and attention with gates and partial rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.bundles import export, export_with
from tests.support.exported import DEVICES, THREADS, answer, policy, prompt
from tests.support.families.qwen import QWEN35
from tests.support.fixtures import References
from tests.support.json_files import read_json, write_json
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS, assert_chat_as_reference
from tests.support.parity import assert_later_equal_fresh as assert_later
from tests.support.reference import Reference
from tests.support.tiny import edited, make, prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.spec import model_size
from vtx.exporter.graphs.gated_delta import CHUNK
from vtx.exporter.reference.model import Encoded
from vtx.exporter.reference.model import Reference as Plain
from vtx.exporter.weights.scaling import channels, scalings
from vtx.exporter.weights.tensors import CheckpointWeights
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.backends import slots
from vtx.runtime.backends.backend import StageCache
from vtx.runtime.backends.openvino import states as openvino_states
from vtx.runtime.backends.slots import StateHistory
from vtx.runtime.bundle.spec.manifest import StageSpec
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Session
from vtx.runtime.vision.tokens import TokenStates
from vtx.tools.estimate import flops
from vtx.tools.estimate.weights import all_weights

TOLERANCE = 1e-4  # in float32 transformers' two forms of the rule differ by half of it
KS = (2, 3, 5, 8)  # 2 and 8 leave stages without attention
WIDE = 300, 160  # of 45 tokens
ROPE = {"rope_type": "default", "rope_theta": 1e4}
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Export, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(QWEN35), tmp_path_factory.mktemp("qwen3.5") / "bundle", KS, "fp32").folder


@pytest.fixture(scope="module")
def judge(reference: References) -> Reference:
    return reference(QWEN35)


def run(
    cache: StageCache, states: NDArray[np.float32], parts: Sequence[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Hidden states that go through a stage in runs of so many tokens each, and the stage's last state."""
    cache.keep(0)
    found, at = list[NDArray[np.float32]](), 0
    for count in parts:
        end = at + count
        positions = np.arange(at, end)
        found.append(cache.append(TokenStates(states[at:end], {}), positions).copy())
        at = end
    history: StateHistory = cache.states  # type: ignore[attr-defined]
    return np.concatenate(found), history.at(at)


def run_on(cache: StageCache, states: NDArray[np.float32], at: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """As `run`, of a cache that holds `at` tokens, one by one."""
    found = [cache.append(TokenStates(states[n : n + 1], {}), np.array([at + n])).copy() for n in range(len(states))]
    history: StateHistory = cache.states  # type: ignore[attr-defined]
    return np.concatenate(found), history.at(at + len(states))


@pytest.mark.parametrize("count", [1, 2, 3, 31, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("equal", [False, True], ids=["random", "equal"])
def test_any_number_of_tokens_in_one_run_is_as_one_token_after_the_other(model: Model, count: int, equal: bool) -> None:
    """Equal tokens have equal keys: a system that a sum of powers would solve with numbers of 10^17."""
    rng = np.random.default_rng(count)
    states = rng.standard_normal((count, model.manifest.model.hidden), dtype=np.float32)
    states = np.broadcast_to(states[:1], states.shape).copy() if equal else states
    cache = model.backend.stage(1, 256)  # layer 2 with attention alone, or layers of both kinds
    cache = cache if model.manifest.stages[1].stateful else model.backend.stage(2, 256)
    single, last = run(cache, states, [1] * count)
    for parts in ([count], [count // 2, count - count // 2], [*[5] * (count // 5), count % 5]):
        found, state = run(cache, states, [part for part in parts if part])
        assert_near(found, single, TOLERANCE)
        assert_near(state, last, TOLERANCE)


def test_states_within_a_run_are_those_of_a_run_that_ends_there(model: Model) -> None:
    rng, ends = np.random.default_rng(0), (1, 17, CHUNK - 1, CHUNK, CHUNK + 1, 100, 2 * CHUNK)
    states = rng.standard_normal((2 * CHUNK + 30, model.manifest.model.hidden), dtype=np.float32)
    cache: Any = model.backend.stage(0, 256)
    for end in ends:
        _, wanted = run(cache, states[:end], [end])
        cache.keep(0)
        cache.mark(end)
        cache.append(TokenStates(states, {}), np.arange(len(states)))
        assert_near(cache.states.at(end), wanted, TOLERANCE)
        assert cache.nearest(len(states)) == len(states)


def test_large_states_are_held_for_few_tokens_and_answers_stay_the_same(
    folder: Path, judge: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in published models, a layer of which has a state of 1 or 2 MiB."""
    with load(folder, device="cpu", threads=THREADS) as loaded:
        each = 4 * loaded.manifest.model.state_numbers
        monkeypatch.setattr(slots, "STATE_BYTES", 3 * each)
        images = [random_image(0, WIDE)]
        assert_later(loaded, images, 3, tolerance=TOLERANCE)
        assert_chat_as_reference(loaded, judge, images, 3, TOLERANCE)
        session = Session(loaded.backend, loaded.manifest)
        before = session.state_bytes
        asked = prompt(loaded, prompt_messages("red?"), images)
        answer(session, asked, policy(None), 40)
        assert session.draft_room == 2
        held = sum(len(stage.stateful) for stage in loaded.manifest.stages) * each
        # those of 0 tokens, of the image's end, of the question's end, and of the last ones, and room for the next
        assert before == 0
        assert session.state_bytes <= 8 * held


@pytest.mark.parametrize("device", DEVICES)
def test_the_states_of_single_tokens_are_neither_copied_nor_written_over(folder: Path, device: str) -> None:
    """Two caches, of which one begins with a state of the other: each token's state is where the run wrote it."""
    rng = np.random.default_rng(0)
    with load(folder, device=device, threads=THREADS) as loaded:
        hidden = rng.standard_normal((40, loaded.manifest.model.hidden), dtype=np.float32)
        one: Any = loaded.backend.stage(0, 64)
        two: Any = loaded.backend.stage(0, 64)
        run(one, hidden, [1] * 3)
        two.copy(one, 3)
        begun, seen = two.states.at(3).copy(), set[int]()
        for at in range(3, 40):
            room = one.states.room(1)
            one.append(TokenStates(hidden[at : at + 1], {}), np.array([at]))
            assert np.shares_memory(one.states.at(at + 1), room)
            seen.add(room.ctypes.data)
        assert len(seen) <= slots.RECENT + 2
        np.testing.assert_array_equal(two.states.at(3), begun)
        found, state = run(loaded.backend.stage(0, 64), hidden, [40])
        assert_near(one.states.at(40), state, TOLERANCE)
        one.keep(38)
        _, again = run_on(one, hidden[38:], 38)
        assert_near(again, state, TOLERANCE)
        assert_near(run_on(two, hidden[3:], 3)[0], found[3:], TOLERANCE)


def test_openvino_has_each_layer_s_states_apart_and_takes_older_graphs_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    found = list[list[NDArray[np.float32]]]()
    for apart in (True, False):
        if not apart:
            monkeypatch.setattr(openvino_states, "readers_of", lambda _: [])  # no cut is found
        with load(folder, device="openvino", threads=THREADS) as loaded:
            stages: Any = loaded.backend
            for stage, spec in zip(stages.stages, loaded.manifest.stages, strict=True):
                parts = [(part.layer, part.first == 0) for part in stage.states.parts]
                layers = range(len(spec.stateful) if apart else 0)
                assert parts == [(layer, whole) for layer in layers for whole in (True, False)]
            cache: Any = loaded.backend.stage(0, 64)
            hidden = np.random.default_rng(0).standard_normal((40, loaded.manifest.model.hidden), dtype=np.float32)
            results = [*run(cache, hidden, [30, 1, 1, 5, 1, 2]), cache.states.at(39).copy()]
            cache.keep(0)
            cache.mark(7)
            cache.append(TokenStates(hidden, {}), np.arange(40))
            found.append([*results, cache.states.at(7).copy(), cache.states.at(40).copy()])
    for one, other in zip(*found, strict=True):
        assert_near(one, other, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_conversations_that_run_together_have_the_states_of_those_that_run_alone(folder: Path, device: str) -> None:
    with load(folder, device=device, threads=THREADS) as loaded:
        backend: Any = loaded.backend
        backend.share_caches(2)
        rows = np.random.default_rng(0).standard_normal((2, 8, loaded.manifest.model.hidden), dtype=np.float32)
        together, lengths = [backend.stage(0, 64) for _ in range(2)], (3, 5)
        for cache, own, length in zip(together, rows, lengths, strict=True):
            run(cache, own[:length], [length])
        for step in range(2):
            at = [length + step for length in lengths]
            given = np.stack([own[n] for own, n in zip(rows, at, strict=True)])
            backend.append_each(0, together, TokenStates(given, {}), np.array(at), [1, 1])
        for cache, own, length in zip(together, rows, lengths, strict=True):
            _, state = run(backend.stage(0, 64), own[: length + 2], [length, 1, 1])
            assert_near(cache.states.at(length + 2), state, TOLERANCE)


def test_of_many_turns_the_image_s_end_and_the_last_ones_are_held(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder, device="cpu", threads=THREADS) as loaded:
        spec = loaded.manifest.model
    monkeypatch.setattr(slots, "STATE_BYTES", 2 * 4 * spec.state_numbers)
    history = StateHistory(StageSpec(1, 1, caches=("state",)), spec)
    for turn in range(20):
        history.mark(10 + 5 * turn)
    assert history.marks == {10, 100, 105}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("fastv:k=3", "reads the attention of layer 3, which has the gated delta rule in this model; .*: 2, 5, 7"),
        ("dart:keep=8,k=4", "reads the attention of layer 4, which has the gated delta rule"),
        (
            "mustdrop:gamma=0.1,alpha=1,layers=2/5,tau=off,key=0",
            "layers with the gated delta rule keep a state, from which none can be taken",
        ),
        ("visionzip:64", "merges patches by the attention of the tower's class token"),
    ],
)
def test_reductions_that_read_what_is_not_there_are_refused_by_name(
    tiny_checkpoint: Export, spec: str, reason: str
) -> None:
    with pytest.raises((UnsupportedModelError, RequestError), match=reason):
        plan_export(ExportOptions(str(tiny_checkpoint(QWEN35)), (3,), "fp32", reductions=(spec,)))


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("text_config", {"layer_types": ["linear_attention"] * 8}, "none of this model's layers has attention"),
        ("text_config", {"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
        (
            "text_config", {"layer_types": ["sliding_attention", *["full_attention"] * 7]},
            "layers of the kind 'sliding_attention' are not supported; vtx exports full_attention, linear_attention",
        ),
        ("text_config", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not supported"),
        ("text_config", {"linear_conv_kernel_dim": 3}, "has shape"),
        ("text_config", {"linear_num_value_heads": 3}, "is not a multiple of linear_num_key_heads 2"),
        ("text_config", {"linear_num_value_heads": 0}, "linear_num_value_heads"),
        ("text_config", {"linear_key_head_dim": 1 << 20}, "linear_key_head_dim is 1048576, not a number from 1"),
        (
            "text_config", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.1}},
            "rotates 1 numbers of a head, not an even number",
        ),
        (
            "text_config", {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 2]}},
            "mrope_section .* does not divide",
        ),
        ("vision_config", {"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes .* is not supported in a"),
    ],
    ids=str,
)  # fmt: skip
def test_models_that_do_not_fit_are_refused_by_name(
    tiny_checkpoint: Export, tmp_path: Path, part: str | None, change: dict[str, Any], reason: str
) -> None:
    broken = edited(tiny_checkpoint(replace(QWEN35, names="saved")), tmp_path / "broken", "config.json", change, part)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        plan_export(ExportOptions(str(broken), (), "fp32"))


def test_layers_for_drafts_in_the_checkpoint_are_left_out(tiny_checkpoint: Export, tmp_path: Path) -> None:
    place = edited(
        tiny_checkpoint(QWEN35), tmp_path / "drafting", "config.json", {"mtp_num_hidden_layers": 1}, "text_config"
    )
    tensors = load_file(place / "model.safetensors")
    tensors |= {f"mtp.layers.0.{name}.weight": torch.ones(4, 4) for name in ("input_layernorm", "self_attn.q_proj")}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    plan = plan_export(ExportOptions(str(place), (3,), "fp32"))
    assert not any(name.startswith("mtp") for name in plan.weights.stored)


@pytest.mark.slow
def test_without_kinds_of_layers_each_fourth_has_attention(tmp_path: Path) -> None:
    place = make(tmp_path / "checkpoint", replace(QWEN35, attending=(3, 7), names="saved"))
    settings = read_json(place / "config.json")
    del settings["text_config"]["layer_types"]
    write_json(place / "config.json", settings | {})
    assert plan_export(ExportOptions(str(place), (), "fp32")).config.text.conv_layers == (1, 2, 3, 5, 6, 7)


def test_graphs_for_gpus_are_exported(tiny_checkpoint: Export) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint(QWEN35)), (3,), "fp32"))
    assert not plan.warnings
    assert [*plan.dialects] == [*DIALECTS]


def test_a_plan_counts_the_weights_that_are_there(tiny_checkpoint: Export) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint(QWEN35)), (), "fp32"))
    size = model_size(plan.config, "tiny")
    wanted = sum(
        int(np.prod(tensor.shape))
        for name, tensor in plan.weights.stored.items()
        if name.startswith(("text.", "head."))
    )
    planned = [group for group in all_weights(size, plan.precisions) if group.name.startswith(("text.", "head."))]
    assert size.decoder.parameters == wanted
    assert sum(group.count * int(np.prod(group.shape)) for group in planned) == wanted
    one, two = (flops.append_flops(size.decoder, [layer], 1, 100) for layer in (1, 2))
    assert one > 2 * size.decoder.macs_of([1])  # the rule's products beside the matrices
    assert two == 2 * (size.decoder.macs_of([2]) + 2 * 101 * 4 * 16)


@pytest.mark.parametrize("device", DEVICES)
def test_k_and_v_in_int8_have_scales_of_the_layers_with_attention(
    tiny_checkpoint: Export, tmp_path: Path, device: str
) -> None:
    options = ExportOptions(str(tiny_checkpoint(QWEN35)), (3,), "fp32", kv_precision="int8", dialects=("ort", "plain"))
    with load(export_with(options, tmp_path / "bundle").folder, device=device, threads=THREADS) as loaded:
        assert all(check.passed for check in check_golden(loaded))


def test_factors_on_channels_without_rounding_leave_the_decoder_as_it_is(tiny_checkpoint: Export) -> None:
    checkpoint, rng = open_checkpoint(str(tiny_checkpoint(QWEN35))), np.random.default_rng(0)
    config = read_config(checkpoint.config)
    checkpoint = replace(checkpoint, shifts=config.text.shifts)
    groups = [group for layer in range(1, config.text.layers + 1) for group in channels(config.text, layer)]
    factors = {g.source: np.exp(rng.standard_normal(g.width // g.sharing)).astype(np.float32) for g in groups}
    by, plain = scalings(config.text, factors), CheckpointWeights(checkpoint)

    class Scaled:
        """The weights times their factors."""

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def read(self, name: str, rows: Any = slice(None)) -> torch.Tensor:
            weight = plain.read(name, rows)
            return torch.from_numpy(by[name].apply(weight.numpy(), 0)) if name in by else weight

    ids, none = np.arange(10, 60), Encoded(torch.zeros((0, config.text.hidden)))
    with torch.inference_mode():
        found, wanted = (Plain(checkpoint, config, w).logits(ids, none, (None,)) for w in (Scaled(), plain))
    assert_near(found[None], wanted[None], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_the_published_sizes_answer_as_transformers(tmp_path: Path, device: str) -> None:
    tiny = replace(
        QWEN35, layers=4, attending=(3,), hidden=256, kv_heads=1, head_dim=256, partial=0.25, context=2048,
        delta=(16, 32, 128, 128),
    )  # fmt: skip
    checkpoint = make(tmp_path / "checkpoint", tiny)
    judge, messages, images = Reference(checkpoint), prompt_messages(QUESTIONS[2] * 10), [random_image(1, WIDE)]
    folder = export(checkpoint, tmp_path / "bundle", (3,), dialects=("ort", "plain")).folder
    with load(folder, device=device, threads=THREADS) as loaded:
        inputs, asked = judge.inputs(messages, images), prompt(loaded, messages, images)
        for k in (None, 3):
            wanted = judge.greedy(inputs, k, 3)
            found = answer(Session(loaded.backend, loaded.manifest), asked, policy(k), 3)
            assert found.argmax(-1).tolist() == wanted.ids
            assert_near(found, wanted.logits, TOLERANCE)
