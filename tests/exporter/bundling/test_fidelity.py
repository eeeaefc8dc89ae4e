"""A new bundle is held to its checkpoint, and narrower arithmetic that stays as near becomes its default."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.bundles import IGNORE, export
from tests.support.commands import invoke
from tests.support.fixtures import Checkpoints
from tests.support.reference import Reference as Judge
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling import fidelity
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.fidelity import (
    MARGIN,
    Divergence,
    NeedsConsentError,
    answer,
    candidates,
    checkpoint_logits,
    measure,
    memory_to_measure,
    questions,
    read,
)
from vtx.exporter.bundling.options import DEMO, ExportOptions, MeasuredArithmetic
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.weights.tensors import BundleWeights
from vtx.runtime.api.load import load
from vtx.runtime.backends import devices
from vtx.runtime.backends.devices import choose, default_compute
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import BundleError, DeviceError
from vtx.runtime.report.inspect import fidelity_lines
from vtx.runtime.units import size
from vtx.tools.data.items import Data, Item, scene_items

pytest.importorskip("openvino", reason="needs vtx-edge[openvino]", exc_type=ImportError)
FLAGS = frozenset({"avx512_vnni", "amx_bf16"})
ALWAYS = MeasuredArithmetic(Data("the drawn scenes", scene_items(3)), always=True)
CPUS = ("ort", "plain")
SMALL = Tiny(layers=2)


def planned(checkpoint: Path | str, precision: str, wanted: MeasuredArithmetic | None = ALWAYS, **more: Any) -> Plan:
    return plan_export(ExportOptions(str(checkpoint), (2,), precision, dialects=CPUS, arithmetic=wanted, **more))


def altered(checkpoint: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A copy of a checkpoint whose tensors, by the ends of their names, are changed in place."""
    shutil.copytree(checkpoint, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The demo in int8, exported as `vtx-export --arithmetic measured` does."""
    return run_export(planned(DEMO, "int8"), tmp_path_factory.mktemp("fidelity") / "demo", force=False, report=IGNORE)


@pytest.fixture(scope="module")
def peaky(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Path:
    """A checkpoint whose logits are so large that a small error of its states is a large one of its answers."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        name = next(name for name in tensors if name.endswith("lm_head.weight"))
        tensors[name] *= 300

    return altered(tiny_checkpoint(Tiny(layers=4)), tmp_path_factory.mktemp("peaky") / "checkpoint", change)


def test_the_divergence_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    wanted, logits = rng.normal(0, 3, (2, 5, 40)).astype(np.float32)
    divergence = Divergence()
    divergence.add(wanted, logits)
    p, q = (torch.log_softmax(torch.from_numpy(values).double(), -1) for values in (wanted, logits))
    expected = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
    assert divergence.kl == pytest.approx(float(expected))
    assert divergence.same == int((wanted.argmax(-1) == logits.argmax(-1)).sum())
    assert divergence.tokens == 5


def test_the_checkpoint_reads_the_same_tokens_as_the_bundle(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """In float32 both give the same logits, about scenes and without a picture."""
    checkpoint = tiny_checkpoint(Tiny(layers=4))
    bundle = export(checkpoint, tmp_path / "b", (2,), "fp32")
    items = questions(MeasuredArithmetic())[:4]
    assert [len(item.images) for item in items] == [0, 1, 0, 1]
    with load(bundle.folder, device="cpu") as model:
        answers = [answer(model, item) for item in items]
        exchanges = [exchange for exchange, _ in answers]
        for exchange, logits in answers:
            assert exchange.answer == tuple(logits.argmax(-1))
            np.testing.assert_allclose(read(model, exchange), logits, atol=1e-5)
    plan = planned(checkpoint, "fp32")
    wanted, largest = checkpoint_logits(plan, bundle.folder, exchanges, lambda _: None)
    assert largest["moved"] < 1e-6
    for (_, logits), expected in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_the_layer_that_rounding_moves_most_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As transformers' layers say, each with its stored weights in its turn, from the states of the whole model."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        """Large weights leave 4 bits nothing for their neighbours."""
        name = next(name for name in tensors if name.endswith("layers.2.mlp.down_proj.weight"))
        tensors[name][:, ::16] *= 30

    folder = altered(tiny_checkpoint(Tiny(layers=4)), tmp_path / "checkpoint", change)
    plan = planned(folder, "int4", allow_changed_answers=True)
    made = run_export(plan, tmp_path / "b", force=False, report=IGNORE)
    named = made.manifest.record["arithmetic"]["f32"]
    items = questions(MeasuredArithmetic())[:1]
    with load(made.folder, device="cpu") as model:
        exchange, _ = answer(model, items[0])
    _, largest = checkpoint_logits(plan, made.folder, [exchange], lambda _: None)
    assert largest["layer"] == named["layer"] == 3
    whole = Judge(folder).model
    layers = whole.model.language_model.layers
    runs = list[Any]()
    for layer in layers:
        layer.register_forward_hook(lambda _, *run: runs.append(run), with_kwargs=True)
    rounded = BundleWeights(made.folder, plan.weights.stored)
    ids = np.append(exchange.ids, exchange.answer[:-1])
    errors = list[float]()
    with torch.inference_mode():
        whole(input_ids=torch.from_numpy(ids)[None], use_cache=False)
        for number, (layer, (inputs, more, output)) in enumerate(zip(layers, tuple(runs), strict=True)):
            layer.load_state_dict({name: rounded.read(f"text.layers.{number}.{name}") for name in layer.state_dict()})
            moved = (layer(*inputs, **more) - output).norm(dim=-1) / output.norm(dim=-1)
            errors.append(float(moved.square().mean().sqrt()))
    assert largest["moved"] == pytest.approx(max(errors), rel=0.01)
    assert errors.index(max(errors)) == 2
    line = f"largest error of a layer: {named['moved']:.2%} of its output, in layer 3"
    assert line in fidelity_lines(made.manifest)
    assert line in invoke("doctor", made.folder).stdout
    assert line in invoke("inspect", made.folder).stdout


@pytest.mark.lesser
@pytest.mark.slow
def test_what_stays_near_is_used_where_the_processor_is_faster_with_it(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = demo.manifest.record["arithmetic"]
    assert record["reference"] == "the checkpoint"
    assert 0 < record["f32"]["kl"] < 0.01
    able = tuple(kind for kind in ("bf16", "int8") if kind in record and "obstacle" not in record[kind])
    assert demo.manifest.arithmetic == able
    assert all(record[kind]["kl"] <= record["f32"]["kl"] + MARGIN for kind in able)
    monkeypatch.setattr(devices, "cpu_flags", lambda: FLAGS)
    whole = replace(demo.manifest, arithmetic=("bf16", "int8"))
    assert default_compute(whole, "openvino") == "int8"
    assert default_compute(replace(whole, precision="int4"), "openvino") == "bf16"
    assert default_compute(replace(whole, arithmetic=("bf16",)), "openvino") == "bf16"
    assert default_compute(replace(whole, arithmetic=()), "openvino") == "f32"
    assert default_compute(whole, "cpu") == "f32"
    monkeypatch.setattr(devices, "cpu_flags", frozenset)
    assert default_compute(whole, "openvino") == "f32"
    elsewhere = replace(demo, manifest=whole)
    chosen = choose(elsewhere, "openvino")
    assert (chosen.compute, chosen.why) == (
        "f32", "asked for; not in bf16 or int8, for which this processor has no instructions"
    )  # fmt: skip
    assert choose(elsewhere, "openvino", "f32").why == "asked for"
    with pytest.raises(DeviceError, match="int8 arithmetic needs one of"):
        choose(elsewhere, "openvino", "int8")


@pytest.mark.lesser
@pytest.mark.slow
def test_the_bundle_answers_in_it_unless_told_otherwise(demo: Bundle) -> None:
    with load(demo.folder, device="openvino") as ours, load(demo.folder, device="openvino", compute="f32") as plain:
        assert ours.backend.compute == default_compute(demo.manifest, "openvino")
        assert plain.backend.compute == "f32"


@pytest.mark.lesser
@pytest.mark.slow
def test_commands_say_what_the_weights_cost(demo: Bundle) -> None:
    [quality, *_] = fidelity_lines(demo.manifest)
    assert re.fullmatch(r"quality: KL [\d.e-]+ nats, [\d.]+% keep the most probable token, over \d+ tokens .*", quality)
    assert quality in invoke("inspect", demo.folder).stdout
    assert quality in invoke("doctor", demo.folder).stdout


def test_products_of_integers_are_not_named_as_a_default_of_int4(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    kinds = {kind: {"kl": 0.1, "same": 0.9} for kind in ("f32", "bf16", "int8")}
    exported = export(tiny_checkpoint(SMALL), tmp_path / "b", (2,), dialects=CPUS).manifest
    manifest = replace(exported, arithmetic=("bf16", "int8"), record={"arithmetic": kinds})
    for precision, default in (("int8", "bf16, int8"), ("int4", "bf16")):
        [line] = fidelity_lines(replace(manifest, precision=precision))
        assert line.endswith(f"used by default: {default}")


@pytest.mark.slow
def test_arithmetic_that_adds_too_much_is_refused_as_soon_as_that_is_certain(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tiny_checkpoint(SMALL), "fp32")
    bundle = export(tiny_checkpoint(SMALL), tmp_path / "b", (2,), "fp32", dialects=CPUS)
    assert candidates(bundle.manifest, always=False) == ()  # onnxruntime is the faster engine of so small a model
    assert candidates(bundle.manifest, always=True) == ("bf16",)  # int8 arithmetic is for integer weights
    monkeypatch.setattr(fidelity, "load", lambda *where, compute, **more: load(*where, compute="f32", **more))
    record = measure(bundle.folder, plan, "openvino", ("bf16",), ALWAYS, IGNORE)
    assert record["reference"] == "the bundle in f32"
    assert record["f32"] == {"kl": 0, "same": 1}
    assert record["bf16"] == {"kl": 0, "same": 1, "tokens": record["tokens"], "accepted": True}
    monkeypatch.setattr(fidelity, "read", lambda model, exchange: read(model, exchange) * 0)
    far = measure(bundle.folder, plan, "openvino", ("bf16",), ALWAYS, IGNORE)["bf16"]
    assert far["accepted"] is False
    assert far["kl"] * far["tokens"] > MARGIN * record["tokens"]
    assert far["tokens"] < record["tokens"]
    assert Bundle.open(bundle.folder).manifest.arithmetic == ()
    monkeypatch.setattr(fidelity, "read", lambda model, exchange: read(model, exchange) * np.float32(np.nan))
    none = measure(bundle.folder, plan, "openvino", ("bf16",), ALWAYS, IGNORE)["bf16"]
    assert none == {"obstacle": "its logits are not finite numbers"}


@pytest.mark.slow
def test_weights_that_lose_the_model_need_consent_and_the_work_is_kept(peaky: Path, tmp_path: Path) -> None:
    with pytest.raises(NeedsConsentError, match=r"a KL of [\d.]+ nats over \d+ tokens, the limit is 1; \d+% keep"):
        run_export(planned(peaky, "int4"), tmp_path / "b", force=False, report=IGNORE)
    assert not (tmp_path / "b").exists()
    said = list[str]()
    allowed = planned(peaky, "int4", allow_changed_answers=True)
    made = run_export(allowed, tmp_path / "b", force=False, report=IGNORE, say=said.append)
    assert said[0] == "resuming an interrupted export; its finished parts are kept"
    assert made.manifest.record["arithmetic"]["f32"]["kl"] > fidelity.MOST
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert not list(made.folder.glob(".*"))


@pytest.mark.lesser
@pytest.mark.slow
def test_a_model_whose_channels_are_too_large_for_one_scale_a_token_is_refused_int8_arithmetic(
    tiny_checkpoint: Checkpoints, tmp_path: Path, needs_arithmetic: Callable[[str], None]
) -> None:
    """One channel is 3,000 times the others: 8 bits of a whole token hold nothing else, 8 bits of bfloat16 do.

    The next token is clear, since the rows of the head are those of the embedding, one token further.
    """
    needs_arithmetic("bf16")
    needs_arithmetic("int8")

    def change(tensors: dict[str, np.ndarray]) -> None:
        table, head = (next(n for n in tensors if n.endswith(end)) for end in ("tokens.weight", "lm_head.weight"))
        rows = np.random.default_rng(0).standard_normal((320, 512)).astype(np.float32)
        rows[:, 0] = 0
        tensors[head] = np.roll(rows, 1, axis=0)
        rows[:, 0] = 3000
        tensors[table] = rows

    folder = altered(tiny_checkpoint(Tiny(layers=2, hidden=512)), tmp_path / "c", change)
    options = planned(folder, "int8", allow_changed_answers=True)
    manifest = run_export(options, tmp_path / "b", force=False, report=IGNORE).manifest
    record = manifest.record["arithmetic"]
    assert record["bf16"]["accepted"]
    assert not record["int8"]["accepted"]
    assert manifest.arithmetic == ("bf16",)
    assert default_compute(manifest, "openvino") != "int8"


@pytest.mark.slow
def test_time_memory_and_instructions_that_are_short_leave_it_out(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "candidates", lambda *_, **__: ("bf16",))
    plan, said = planned(tiny_checkpoint(SMALL), "int8", MeasuredArithmetic()), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "SECONDS", 0.0)
        patch.setattr(fidelity, "missing_instructions", lambda _: None)
        made = run_export(plan, tmp_path / "time", force=False, report=IGNORE, say=said.append)
    record = made.manifest.record["arithmetic"]
    assert record["questions"] == 1
    assert record["bf16"] == {"obstacle": "there was no time for it in 0 s; vtx-fit measures it"}
    assert not said
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "available_memory", lambda: 12_000_000)
        patch.setattr(fidelity, "missing_instructions", lambda _: None)
        short = run_export(plan, tmp_path / "memory", force=False, report=IGNORE, say=said.append)
    needed = size(memory_to_measure(short.folder, "openvino", ("bf16",)))
    assert said.pop().startswith(
        f"not measuring the bundle's answers in f32 and bf16 arithmetic, which needs about {needed} of memory (12 MB is"
    )
    assert "arithmetic" not in short.manifest.record
    limited = planned(tiny_checkpoint(SMALL), "int8", MeasuredArithmetic(memory=10_000_000))
    run_export(limited, tmp_path / "limit", force=False, report=IGNORE, say=said.append)
    assert "(10 MB is allowed)" in said.pop()
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "missing_instructions", lambda _: "none")
        lacking = run_export(plan, tmp_path / "flags", force=False, report=IGNORE, say=said.append)
    assert said.pop().startswith("not measuring bf16 arithmetic, for which this processor has no instructions")
    assert "bf16" not in lacking.manifest.record["arithmetic"]
    assert "f32" in lacking.manifest.record["arithmetic"]


def test_questions_that_cannot_be_asked_and_logits_that_are_no_numbers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = Data("pairs", (Item((random_image(1), random_image(2)), "alike?"),))
    plan, said = planned(tiny_checkpoint(SMALL), "int8", MeasuredArithmetic(pairs)), list[str]()
    made = run_export(plan, tmp_path / "pairs", force=False, report=IGNORE, say=said.append)
    assert said == ["not measuring the bundle's answers: no question about one image fits its template and its context"]
    assert "arithmetic" not in made.manifest.record
    given = fidelity.answer

    def without_numbers(*about: Any) -> Any:
        exchange, logits = given(*about)
        return exchange, logits * np.float32(np.nan)

    monkeypatch.setattr(fidelity, "answer", without_numbers)
    with pytest.raises(BundleError, match="not finite numbers"):
        measure(made.folder, plan, "cpu", (), ALWAYS, IGNORE)


@pytest.mark.slow
def test_one_engine_is_in_memory_at_a_time_and_one_that_fails_is_recorded(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tiny_checkpoint(SMALL), "int8")
    made = run_export(replace(plan, options=replace(plan.options, arithmetic=None)), tmp_path / "b", force=False,
                      report=IGNORE)  # fmt: skip
    events = list[Any]()

    @contextmanager
    def counted(*where: Any, compute: str, **more: Any) -> Iterator[Any]:
        if compute == "bf16":
            raise DeviceError("this processor computes FP32, not bf16")
        with load(*where, compute="f32", **more) as model:
            events.append(compute)
            yield model
        events.append("closed")

    @contextmanager
    def returned(**_: Any) -> Iterator[None]:
        yield
        events.append("returned")

    monkeypatch.setattr(fidelity, "load", counted)
    monkeypatch.setattr(fidelity, "returning_memory", returned)
    kinds = ("bf16", "int8")
    record = measure(made.folder, plan, "openvino", kinds, ALWAYS, lambda *done: events.append(done))
    order = [event for event in events if isinstance(event, str)]
    assert events[0] == ("arithmetic", 0, events[0][2]), "before an engine takes memory, which is not the export's own"
    assert order == ["f32", "closed", "returned", "returned", "int8", "closed", "returned"]
    assert record["bf16"] == {"obstacle": "this processor computes FP32, not bf16"}
    assert Bundle.open(made.folder).manifest.arithmetic == ("int8",)
