"""The methods that a bundle offers, their names, and what a tower's and a gate's work counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support.bundles import export_with
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS, Models
from tests.support.families.smolvlm import SMOLVLM
from tests.support.fixtures import Checkpoints
from tests.support.gates import certain_gate, write_gates
from tests.support.json_files import read_json
from tests.support.tiny import Tiny

from vtx import cli
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.policies import parse
from vtx.tools.bench.methods import find_methods, short
from vtx.tools.bench.stopwatch import timed

TINY = Tiny(image=84)  # 6 x 6 patches, so four windows
V, MERGED = 36, 4 * 8


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ExportOptions(
        str(tiny_checkpoint(TINY)), (), "fp32", dialects=DIALECTS, reductions=("none", "lsm:tau=-1")
    )
    return export_with(options, tmp_path_factory.mktemp("methods") / "bundle").folder


@pytest.mark.sampled
@pytest.mark.parametrize("dialect", ["plain", "trt"])
def test_rows_of_merged_windows_that_a_graph_computes_all_the_same_are_counted(bundle: Path, dialect: str) -> None:
    backend, calls = timed(DialectBackend(Bundle.open(bundle), dialect))
    assert len(backend.vision(np.zeros((1, 3, 84, 84), np.float32), {"tau": np.float32([-1])})) == V - MERGED
    assert calls[0].tokens == V


@pytest.fixture(scope="module", params=[True, False], ids=["fires", "never"])
def gated(
    request: pytest.FixtureRequest, tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Path]:
    """Whether the gate before layer 3 fires for every question, and the bundle."""
    folder = tmp_path_factory.mktemp("gated")
    gates = write_gates(folder / "gates.safetensors", {3: certain_gate(request.param)})
    options = ExportOptions(str(tiny_checkpoint()), (3,), "fp32", gates=gates, dialects=("ort",))
    made = export_with(options, folder / "bundle")
    return request.param, made.folder


@pytest.mark.sampled(2)
def test_the_time_with_gates_is_measured_as_well(gated: tuple[bool, Path], tmp_path: Path) -> None:
    fires, folder = gated
    words = ["--bundle", str(folder), "--repeats", "1", "--threads", str(THREADS), "--out", str(tmp_path / "out.json")]
    done = CliRunner().invoke(cli.bench, [*words, "--new-tokens", "3"], prog_name="vtx-bench")
    assert done.exit_code == 0, done.stderr
    depths = read_json(tmp_path / "out.json")["depths"]
    assert [depth["k"] for depth in depths] == [None, 3, "auto"]
    assert depths[2]["full_layers"] == (2 if fires else 8)
    assert depths[2]["prefill_flops"] == depths[1 if fires else 0]["prefill_flops"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("mustdrop:192", "mustdrop:192"),
        ("mustdrop:64,key=0", "mustdrop:64,key=0"),
        ("mustdrop:gamma=0.5", "mustdrop:gamma=0.5,alpha=0.001,tau=0.8,key=0.08"),
        ("lsm", "lsm:tau=0.8"),
        ("lsm:order=merged-first", "lsm:tau=0.8,order=merged-first"),
        ("cls", "cls:keep=0.25"),
    ],
)
def test_a_name_is_short_and_tells_methods_apart(word: str, name: str) -> None:
    assert [short(part) for part in parse(word)] == [name]


def only(model: Model, *reductions: str) -> Any:
    """A manifest with these reductions and no default K."""
    return SimpleNamespace(
        reductions=reductions, default_k=None, layout=model.manifest.layout, model=model.manifest.model
    )


def test_without_a_fixed_k_nothing_stands_behind_a_reduction(models: Models) -> None:
    manifest = only(models(), "cls:keep=0.25")
    assert [method.kind for method in find_methods(manifest, (None,))] == ["withdrawal", *["pruning"] * 3]
    assert [method.name for method in find_methods(manifest, ("auto", 4))] == [
        "none", "gates", "K = 4", "cls:keep=0.25", "cls:keep=0.25 + K = 4", "random:keep=0.25", "random:keep=0.5",
    ]  # fmt: skip
    own = only(models(), "random:keep=0.75")
    assert [method.name for method in find_methods(own, (None,))] == ["none", "random:keep=0.75"]


def test_random_tokens_stand_beside_withdrawal_too_unless_text_is_among_an_images_tokens(models: Models) -> None:
    assert [method.name for method in find_methods(only(models()), (4,))] == [
        "none", "K = 4", "random:keep=0.25", "random:keep=0.5",
    ]  # fmt: skip
    assert [method.name for method in find_methods(only(models()), (None,))] == ["none"]
    marked = only(models(SMOLVLM), "fastv:k=2,ratio=0.5")
    assert [method.name for method in find_methods(marked, (None,))] == ["none", "fastv:k=2,ratio=0.5"]
