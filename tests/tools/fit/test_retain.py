"""--retain: the thresholds that are found keep what was asked for, and what cannot be kept is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support.bundles import IGNORE
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.tiny import Tiny, random_image

from vtx.cli import export as export_command
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import RequestError
from vtx.tools.data.items import Data, Item
from vtx.tools.fit.retain import Retain

TINY = Tiny(layers=6, image=126, context=512)
WORD = "mustdrop:gamma=0.004,alpha=0.01,tau=off,key=0.1,layers=2/4"
DATA = Data(
    "a few pictures",
    tuple(Item((random_image(seed),), words) for seed, words in enumerate(("red?", "how many?", "what is left?"))),
)


@pytest.fixture(scope="module", autouse=True)
def pool(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests' own number of threads, before a search takes all of the machine's."""
    from tests.support.bundles import export

    load(export(tiny_checkpoint(), tmp_path_factory.mktemp("pool") / "b", ()).folder, threads=THREADS)


def options(checkpoint: Path, tokens: float, *words: str) -> ExportOptions:
    return ExportOptions(
        str(checkpoint), (), "fp32", dialects=("ort",), reductions=words or (WORD,), retain=Retain(tokens, DATA)
    )


def mean(bundle: Bundle, spec: str) -> float:
    """Image rows after pruning, mean over layers and questions, counted from what each layer held."""
    model, kept = load(bundle.folder, threads=THREADS), []
    for item in DATA.items:
        with model.open(list(item.images)) as image:
            answer = image.ask(item.question, None, Options(max_new_tokens=1), reduce=spec)
        held = answer.stats.vision_tokens_kept
        kept.append(np.mean([*held[1:], held[-1]]))
    return float(np.mean(kept))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [25, 45, 75])
def test_the_thresholds_found_keep_what_was_asked_for(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tokens: int
) -> None:
    other = "fastv:k=3,ratio=0.5"
    bundle = run_export(
        plan_export(options(tiny_checkpoint(TINY), tokens, WORD, other)), tmp_path / "b", force=False, report=IGNORE
    )
    spec, kept = bundle.manifest.reductions
    assert kept == other
    assert "layers=2/4" in spec
    assert "key=0.1" in spec
    record = bundle.manifest.record["retain"]
    assert mean(bundle, spec) == pytest.approx(record["found"], abs=0.02)
    assert record["found"] == pytest.approx(tokens, abs=2.5)
    assert (record["asked"], record["questions"], record["data"]) == (tokens, 3, "a few pictures")
    assert load(tmp_path / "b", threads=THREADS).manifest == bundle.manifest


@pytest.mark.parametrize("tokens", [3, 82])
def test_a_number_out_of_reach_is_refused_with_the_range_and_leaves_nothing(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tokens: int
) -> None:
    with pytest.raises(RequestError, match=r"cannot be reached: .* keep from 21\.0 to 81\.0 vision tokens"):
        run_export(plan_export(options(tiny_checkpoint(TINY), tokens)), tmp_path / "b", force=False, report=IGNORE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spec", "tokens", "message"),
    [("fastv", 20, "such as mustdrop"), ("mustdrop:gamma=0,layers=2", 20, "above 0"), (WORD, -1, "above 0"),
     (WORD, float("nan"), "above 0")],
)  # fmt: skip
def test_without_thresholds_to_look_for_nothing_begins(
    tiny_checkpoint: Checkpoints, spec: str, tokens: float, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        plan_export(options(tiny_checkpoint(TINY), tokens, spec))


def test_the_command_needs_data_for_a_model_of_the_user_s(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(tiny_checkpoint(TINY)),
        "--reduce",
        WORD,
        "--retain",
        "20",
        "--out",
        str(tmp_path / "b"),
    ]
    done = CliRunner().invoke(export_command, arguments)
    assert done.exit_code == 2
    assert "--calibration" in done.stderr
    assert not list(tmp_path.iterdir())
