"""Small checkpoints of published files answer as transformers does on the same files, as published and saved again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.bundles import export_anew
from tests.support.exported import greedy, prompt
from tests.support.published.build import build, reason_absent
from tests.support.published.compare import OK, TOLERANCE, Row, compare
from tests.support.published.places import models, published, read
from tests.support.published.resaved import resave
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.errors import VtxError

PUBLISHED, RESAVED = "published", "saved by transformers 5"
END = {"internvl2-8b": 92542, "llava-v1.5-7b": 2, "vila1.5-3b": 2}  # at which the released code ends an answer
AUTHORS = tuple(END)  # whose layout transformers does not read
OPENVLA = "openvla-7b"  # nor this one, which is of its own kind
# Of jinja2, for "\\s" in the published template of llava-v1.6-mistral.
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
# The small ones first, of which `make test` takes the first.
NAMES = sorted({*models()} - {*AUTHORS, OPENVLA}, reverse=True) or ["none"]


@pytest.fixture(autouse=True)
def published_files() -> None:
    if not models():
        pytest.skip(f"no published files in {published()}; name a folder of them in PUBLISHED")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def checkpoint_of(name: str, files: str, folder: Path) -> Path:
    """The small checkpoint of a model; a skip where a file for it is absent."""
    if name not in models():
        pytest.skip(f"{published()} has none of the models that this test is for")
    source = models()[name]
    if reason := reason_absent(source):
        pytest.skip(f"{name}: {reason}")
    if files == PUBLISHED:
        return build(source, folder / "published")
    return resave(build(source, folder / "published", plain=is_quantised(name)), folder / "saved")


def is_quantised(name: str) -> bool:
    return "quantization_config" in read(models()[name] / "config.json")


@pytest.mark.sampled(64)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("files", [PUBLISHED, RESAVED])
def test_a_published_model_answers_as_transformers_does(
    name: str, files: str, tmp_path: Path, closing: ExitStack
) -> None:
    from tests.support.published.judge import Judge

    row = Row(name, files)
    checkpoint = checkpoint_of(name, files, tmp_path)
    bundle = exported(row, checkpoint, tmp_path / "bundle")
    model = closing.enter_context(load(bundle, device="cpu", threads=1))
    try:
        plain = files == PUBLISHED and is_quantised(name)
        judge = Judge(build(models()[name], tmp_path / "plain", plain=True) if plain else checkpoint)
        compare(row, model, judge)
    finally:
        row.record()
    assert not row.faults


def exported(row: Row, checkpoint: Path, folder: Path) -> Path:
    """The bundle of a checkpoint; a refusal is kept in the row."""
    try:
        return export_anew(ExportOptions(str(checkpoint), (), "fp32", dialects=("ort",)), folder).folder
    except VtxError as reason:
        row.export = f"refused: {reason}"
        row.record()
        raise


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in AUTHORS if name in models()] or ["none"])
def test_a_model_in_its_authors_layout_answers_as_the_released_code_would(
    name: str, tmp_path: Path, closing: ExitStack
) -> None:
    from tests.support.published.authors import ASKED, Authors

    row = Row(name, PUBLISHED)
    checkpoint = checkpoint_of(name, PUBLISHED, tmp_path)
    model = closing.enter_context(load(exported(row, checkpoint, tmp_path / "bundle"), device="cpu", threads=1))
    judge, images = Authors(checkpoint, tmp_path / "theirs"), [random_image(1, (640, 480)), random_image(2, (336, 336))]
    row.ids = row.logits = OK
    for question, number in ASKED:
        ids, logits = judge.ask(question, images[:number])
        asked = prompt(model, prompt_messages(question, number), images[:number])
        if asked.ids.tolist() != ids:
            row.ids = f"{question[:20]}: {len(asked.ids)} ids, theirs {len(ids)}"
        elif (most := float(abs(greedy(model, asked, None, 1).logits[0] - logits.numpy()).max())) > TOLERANCE:
            row.logits = f"up to {most:.2g}: {question[:20]}"
    row.ends = OK if model.manifest.text.end_ids == (END[name],) else f"{model.manifest.text.end_ids}"
    row.record()
    assert not row.faults


@pytest.mark.slow
def test_openvla_answers_as_its_statement(tmp_path: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.families import openvla
    from tests.support.published import originals

    row = Row(OPENVLA, PUBLISHED)
    checkpoint = checkpoint_of(OPENVLA, PUBLISHED, tmp_path)
    closing.callback(originals.with_small_towers().undo)
    model = closing.enter_context(load(exported(row, checkpoint, tmp_path / "bundle"), device="cpu", threads=1))
    towers = read(checkpoint / "preprocessor_config.json")["tvf_normalize_params"]  # what the released code applies
    monkeypatch.setattr(openvla, "MEANS", [tower["mean"] for tower in towers])
    monkeypatch.setattr(openvla, "STDS", [tower["std"] for tower in towers])
    judge, image = openvla.Judge(checkpoint, originals.OPENVLA), random_image(1, (640, 480))
    judge.weights = {name: tensor.bfloat16().float() for name, tensor in judge.weights.items()}
    judge.llama.load_state_dict({name: tensor.bfloat16().float() for name, tensor in judge.llama.state_dict().items()})
    asked = prompt(model, prompt_messages("pick up the red cup"), [image])
    ids = judge.ids("pick up the red cup")
    row.ids = OK if asked.ids.tolist() == [ids[0], *[model.manifest.text.image_token_id] * 256, *ids[1:]] else "differ"
    logits = judge.logits(ids, judge.features(image), None, len(ids)).detach()
    most = float(abs(greedy(model, asked, None, 1).logits[0] - logits.numpy()).max())
    row.logits = OK if most <= TOLERANCE else f"up to {most:.2g}"
    row.record()
    assert not row.faults
