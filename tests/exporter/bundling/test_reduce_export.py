"""Exporting for reductions: the cuts of the decoder, the graphs, and the refusals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from tests.support.bundles import IGNORE
from tests.support.families.internvl import INTERNVL
from tests.support.families.qwen import QWEN2
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny
from vtx.cli import export as export_command
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import RequestError, UnsupportedModelError, VtxError

MUSTDROP = "mustdrop:gamma=0.001,alpha=0.001,tau=0.8,key=0.08,layers=2/5,positions=keep,order=raster,keys=used-block"


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a command remembers stays, nor does its handling of signals."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def make(
    checkpoint: Path, out: Path, *words: str, ks: tuple[int, ...] = (), dialects: tuple[str, ...] = ("ort",)
) -> Bundle:
    options = ExportOptions(str(checkpoint), ks, "fp32", dialects=dialects, reductions=words)
    return run_export(plan_export(options), out, force=False, report=IGNORE)


def outputs(bundle: Bundle, graph: str) -> set[str]:
    return {value.name for value in onnx.load(bundle.path(graph), load_external_data=False).graph.output}


def test_the_decoder_is_cut_for_every_k_and_every_reduction(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    bundle = make(tiny_checkpoint(), tmp_path / "b", "mustdrop:layers=2/5", "fastv:k=3,ratio=0.25", ks=(4, 7))
    graphs = bundle.manifest.dialects["ort"]
    found = [(stage.first, stage.last, stage.query) for stage in bundle.manifest.stages]
    assert found == [(1, 1, False), (2, 2, True), (3, 3, True), (4, 5, True), (6, 6, True), (7, 8, False)]
    assert bundle.manifest.variants == (4, 7)
    assert bundle.manifest.reductions == (MUSTDROP, "fastv:k=3,ratio=0.25")
    assert (graphs.vision_merges, graphs.vision_attention) == (True, True)
    assert [graph for graph in graphs.stages if "query" in outputs(bundle, graph)] == [
        graph for stage, graph in bundle.manifest.stage_files("ort") if stage.query
    ]
    assert outputs(bundle, str(graphs.score)) == {"attention_sum", "attention_max"}


@pytest.mark.parametrize(
    ("word", "merges", "attention", "scored"),
    [("lsm", True, False, False), ("cls", False, True, False), ("fastv", False, False, True),
     ("mustdrop:192,tau=off,key=0", False, False, True), ("mustdrop:192,key=0", True, False, True),
     ("none", False, False, False)],
)  # fmt: skip
def test_a_bundle_has_what_its_reductions_need_and_no_more(
    tiny_checkpoint: Checkpoints, tmp_path: Path, word: str, merges: bool, attention: bool, scored: bool
) -> None:
    bundle = make(tiny_checkpoint(Tiny(layers=16)), tmp_path / "b", word)
    graphs = bundle.manifest.dialects["ort"]
    extras = ({"patch_index", "merged", "similarity"} if merges else set()) | (
        {"cls_attention"} if attention else set()
    )
    assert outputs(bundle, graphs.vision) == {"image_features"} | extras
    assert (graphs.vision_merges, graphs.vision_attention, graphs.score is not None) == (merges, attention, scored)
    assert any(stage.query for stage in bundle.manifest.stages) == scored


def test_reductions_add_no_weight_and_change_no_other_graph(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    plain = make(tiny_checkpoint(), tmp_path / "plain", ks=(3,))
    reduced = make(tiny_checkpoint(), tmp_path / "reduced", "lsm", "fastv:k=2,ratio=0.5", ks=(3,))
    before, after = plain.manifest.files, reduced.manifest.files
    assert set(after) == set(before), "a rest at K = 3 reads the attention that fastv reads"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"vision.ort.onnx"}
    assert not any(name.startswith("weights/") for name in changed)


def test_every_dialect_has_what_reductions_need(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = ExportOptions(str(tiny_checkpoint()), (), "fp32", reductions=("mustdrop:layers=2/5",))
    plan = plan_export(options)
    assert not plan.warnings
    bundle = run_export(plan, tmp_path / "b", force=False, report=IGNORE)
    assert set(bundle.manifest.dialects) == set(DIALECTS)
    for graphs in bundle.manifest.dialects.values():
        assert graphs.score
        assert graphs.vision_merges
        assert graphs.vision_attention
        expected = {"image_features", "patch_index", "merged", "similarity", "cls_attention"}
        assert outputs(bundle, graphs.vision) == expected


@pytest.mark.parametrize(
    ("tiny", "specs", "error", "message"),
    [
        (Tiny(), ("mustdorp",), RequestError, "no reduction is called 'mustdorp'"),
        (Tiny(), ("mustdrop:193",), RequestError, "no preset '193'"),
        (Tiny(), ("fastv:k=two",), RequestError, "give a whole number"),
        (Tiny(), ("mustdrop:192",), RequestError, "8 layers"),
        (Tiny(), ("fastv:k=8",), RequestError, "8 layers"),
        (Tiny(), ("lsm+mustdrop:192,layers=2",), RequestError, "both set tau"),
        (Tiny(), ("lsm", "lsm:tau=0.8"), RequestError, "given twice"),
        (Tiny(vision="siglip"), ("cls",), UnsupportedModelError, "no class token"),
        (Tiny(vision="siglip"), ("visionzip",), UnsupportedModelError, "its tower has no class token; use"),
        (INTERNVL, ("hiprune:layer=1",), UnsupportedModelError, "covers 2 x 2 patches"),
        (Tiny(), ("hiprune",), UnsupportedModelError, "reads block 9 of the tower, but this model uses"),
        (Tiny(), ("hiprune:layer=1", "hiprune:layer=2"), RequestError, "blocks 1 and 2 of the tower"),
        (INTERNVL, ("visionzip",), UnsupportedModelError, "each of its tokens covers 2 x 2 patches"),
        (QWEN2, ("visionzip",), UnsupportedModelError, "each of its tokens covers 2 x 2 patches"),
        (Tiny(vision="siglip"), ("mustdrop:192,layers=2",), UnsupportedModelError, "key=0"),
        (Tiny(image=28), ("lsm",), UnsupportedModelError, "2 x 2"),
        (Tiny(feature_layer=(0, 2)), ("lsm",), UnsupportedModelError, "vision_feature_layer 0"),
        (Tiny(feature_layer=1), ("lsm", "cls"), UnsupportedModelError, "two layers of the tower"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    tiny: Tiny,
    specs: tuple[str, ...],
    error: type[VtxError],
    message: str,
) -> None:
    with pytest.raises(error, match=message) as caught:
        make(tiny_checkpoint(tiny), tmp_path / "b", *specs)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_command_takes_several_words_and_says_what_it_took(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "b"
    arguments = [
        "--model",
        str(tiny_checkpoint()),
        "--k",
        "4",
        "--reduce",
        "lsm",
        "--reduce",
        "fastv",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(export_command, arguments)
    assert done.exit_code == 0, done.output
    for word in Bundle.open(out).manifest.reductions:
        assert word in done.stderr
    assert Bundle.open(out).manifest.reductions[0] == "lsm:tau=0.8,order=raster"
