"""Arithmetic that keeps a bundle's answers is written into it and used by default; other arithmetic is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.support.bundles import IGNORE, copy, export
from tests.support.tiny import Tiny

from vtx.exporter.bundling import export as export_module
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import DEMO, ExportOptions, MeasuredArithmetic
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.backends import devices
from vtx.runtime.backends.devices import choose, default_compute, missing_instructions
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import DeviceError
from vtx.runtime.units import size
from vtx.tools.data.items import Data, scene_items
from vtx.tools.fit import arithmetic
from vtx.tools.fit.arithmetic import candidates, measure_arithmetic, memory_to_measure

pytest.importorskip("openvino", reason="needs vtx-edge[openvino]", exc_type=ImportError)
ENOUGH = 36  # questions: if every answer stays the same, the interval begins at 0.904
FLAGS = frozenset({"avx512_vnni", "amx_bf16"})


def questions(count: int) -> Data:
    return Data("the drawn scenes", scene_items(count))


@pytest.fixture
def unmeasured(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """The demo in int8, without measured arithmetic."""
    return export(Path(DEMO), tmp_path / "demo", (16,), "int8", dialects=("ort", "plain")).folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The demo in int8, exported as `vtx-export --arithmetic measured` does."""
    wanted = MeasuredArithmetic(questions(ENOUGH), always=True)
    plan = plan_export(ExportOptions(DEMO, (16,), "int8", dialects=("ort", "plain"), arithmetic=wanted))
    return run_export(plan, tmp_path_factory.mktemp("arithmetic") / "demo", force=False, report=IGNORE)


@pytest.mark.lesser
@pytest.mark.slow
def test_what_keeps_the_answers_is_used_where_the_processor_is_faster_with_it(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = demo.manifest.record["arithmetic"]
    able = [kind for kind in ("bf16", "int8") if "obstacle" not in found[kind]]
    assert demo.manifest.arithmetic == tuple(able)
    assert all(found[kind]["kept"] == ENOUGH and found[kind]["low"] > 0.9 for kind in able)
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


def test_the_memory_of_a_large_check_is_said_before_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, said = MeasuredArithmetic(questions(1), always=True), list[str]()
    plan = plan_export(
        ExportOptions(str(tiny_checkpoint()), (2,), "fp32", dialects=("ort", "plain"), arithmetic=wanted)
    )
    run_export(plan, tmp_path / "small", force=False, report=IGNORE, say=said.append)
    assert not said
    monkeypatch.setattr(export_module, "LARGE", 0)
    made = run_export(plan, tmp_path / "large", force=False, report=IGNORE, say=said.append)
    (line,) = said
    needed = size(memory_to_measure(made.folder, ("bf16",)))
    assert line.startswith(f"checking bf16 arithmetic on 1 questions, which needs about {needed} of memory")


@pytest.mark.parametrize("always", [True, False])
def test_a_check_that_does_not_fit_is_left_out_unless_asked_for(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    monkeypatch.setattr(export_module, "candidates", lambda *_, **__: ("bf16",))
    monkeypatch.setattr(export_module, "available_memory", lambda: 12_000_000)
    wanted, said = MeasuredArithmetic(questions(1), always=always), list[str]()
    plan = plan_export(
        ExportOptions(str(tiny_checkpoint()), (2,), "fp32", dialects=("ort", "plain"), arithmetic=wanted)
    )
    made = run_export(plan, tmp_path / "made", force=False, report=IGNORE, say=said.append)
    (line,) = said
    needed = size(memory_to_measure(made.folder, ("bf16",)))
    assert ("arithmetic" in made.manifest.record) == always
    if always:
        assert f"needs about {needed} of memory (12 MB is free); --arithmetic f32 leaves it out" in line
    else:
        assert line.startswith(f"not checking bf16 arithmetic, which needs about {needed} of memory (12 MB is free)")
        assert made.manifest.arithmetic == ()


@pytest.mark.slow
def test_one_arithmetic_is_in_memory_at_a_time(demo: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one took is returned to the system before the next one loads."""
    open_now, most = 0, 0

    @contextmanager
    def counted(*given: Any, **more: Any) -> Iterator[Any]:
        nonlocal open_now, most
        with load(*given, **more) as model:
            open_now += 1
            most = max(most, open_now)
            yield model
        open_now -= 1

    events = list[str]()

    @contextmanager
    def returned(**_: Any) -> Iterator[None]:
        yield
        events.append(f"returned with {open_now} open")

    monkeypatch.setattr(arithmetic, "load", counted)
    monkeypatch.setattr(arithmetic, "returning_memory", returned)
    kinds = demo.manifest.arithmetic
    measure_arithmetic(copy(demo.folder, tmp_path / "b"), kinds, questions(2), IGNORE)
    assert most == 1
    assert events == ["returned with 0 open"] * (1 + len(kinds))


def test_arithmetic_that_changes_answers_is_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Random weights: their largest logits are so close that bfloat16 changes the order."""
    bundle = export(tiny_checkpoint(Tiny(layers=4)), tmp_path / "b", (2,), "fp32")
    assert candidates(bundle.manifest, always=False) == ()  # onnxruntime is the faster engine of so small a model
    assert candidates(bundle.manifest, always=True) == ("bf16",)  # int8 arithmetic is for integer weights
    measure_arithmetic(bundle.folder, ("bf16",), questions(ENOUGH), IGNORE)
    manifest = Bundle.open(bundle.folder).manifest
    found = manifest.record["arithmetic"]["bf16"]
    if "obstacle" in found:
        pytest.skip(found["obstacle"])
    assert found["kept"] < ENOUGH
    assert found["low"] < 0.9
    assert manifest.arithmetic == ()


@pytest.mark.lesser
@pytest.mark.slow
def test_a_model_whose_channels_are_too_large_for_one_scale_a_token_is_refused_int8_arithmetic(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One channel is 3,000 times the others: 8 bits of a whole token hold nothing else, 8 bits of bfloat16 do.

    The next token is clear, since the rows of the head are those of the embedding, one token further.
    """
    folder = tmp_path / "c"
    shutil.copytree(tiny_checkpoint(Tiny(layers=2, hidden=512)), folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    names = {part: next(n for n in tensors if n.endswith(part)) for part in ("embed_tokens.weight", "lm_head.weight")}
    rows = np.random.default_rng(0).standard_normal((320, 512)).astype(np.float32)
    rows[:, 0] = 0
    tensors[names["lm_head.weight"]] = np.roll(rows, 1, axis=0)
    rows[:, 0] = 3000
    tensors[names["embed_tokens.weight"]] = rows
    save_file(tensors, file)
    bundle = export(folder, tmp_path / "b", (2,), "int8")
    measure_arithmetic(bundle.folder, ("bf16", "int8"), questions(ENOUGH), IGNORE)
    manifest = Bundle.open(bundle.folder).manifest
    found = manifest.record["arithmetic"]
    if obstacles := [found[kind]["obstacle"] for kind in ("bf16", "int8") if "obstacle" in found[kind]]:
        pytest.skip(obstacles[0])
    assert found["bf16"]["kept"] == ENOUGH
    assert found["int8"]["high"] < 0.9
    assert manifest.arithmetic == ("bf16",)
    assert default_compute(manifest, "openvino") != "int8"


@pytest.mark.slow
@pytest.mark.lesser
def test_questions_about_one_image_are_not_taken_as_independent(unmeasured: Path) -> None:
    """18 of 18 answers stay the same about nine scenes: both of a scene's may have changed together."""
    kinds = [kind for kind in ("bf16", "int8") if not missing_instructions(kind)][:1]
    measure_arithmetic(unmeasured, kinds, Data("the drawn scenes", scene_items(9, 2)), IGNORE)
    manifest = Bundle.open(unmeasured).manifest
    found = manifest.record["arithmetic"]
    assert (found["questions"], found["images"]) == (18, 9)
    for kind in kinds:
        assert found[kind]["kept"] == 18
        assert found[kind]["low"] == pytest.approx(0.701, abs=1e-3)
    assert manifest.arithmetic == ()


@pytest.mark.lesser
@pytest.mark.slow
def test_few_questions_prove_nothing_and_a_failing_engine_is_recorded(
    unmeasured: Path, monkeypatch: pytest.MonkeyPatch, needs_arithmetic: Callable[[str], None]
) -> None:
    needs_arithmetic("int8")

    def failing(*given: Any, compute: str, **more: Any) -> Any:
        if compute == "bf16":
            raise DeviceError("this processor computes FP32, not bf16")
        return load(*given, compute=compute, **more)

    monkeypatch.setattr(arithmetic, "load", failing)
    measure_arithmetic(unmeasured, ("bf16", "int8"), questions(5), IGNORE)
    manifest = Bundle.open(unmeasured).manifest
    assert manifest.arithmetic == ()
    assert manifest.record["arithmetic"]["int8"]["kept"] == 5
    assert manifest.record["arithmetic"]["bf16"] == {"obstacle": "this processor computes FP32, not bf16"}


def test_its_progress_begins_before_an_engine_takes_memory(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vtx-export` reads the memory of the export itself at that report."""
    seen: list[object] = []

    def failing(*_: Any, compute: str, **__: Any) -> Any:
        seen.append(compute)
        raise DeviceError("no memory")

    monkeypatch.setattr(arithmetic, "load", failing)
    monkeypatch.setattr(arithmetic, "seal_manifest", lambda *_: None)
    folder = export(tiny_checkpoint(Tiny(layers=4)), tmp_path / "b", (2,), "fp32").folder
    measure_arithmetic(folder, ("bf16",), questions(5), lambda *given: seen.append(given))
    assert seen == [("arithmetic", 0, 10), "f32", ("arithmetic", 10, 10)]
