"""Guided answers of libvtx: the token ids of Python under the same form, sampling and bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from benchmarks.schemas import random_schema

from tests.support.bundles import ORT, export
from tests.support.cabi import Loaded
from tests.support.cpp import needs_cpp
from tests.support.exported import THREADS, Models
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.prepare import demo_checkpoint
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

llguidance = pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
pytestmark = needs_cpp
QUESTION, TOKENS = "How many shapes are there?", 60


@pytest.fixture(scope="module", params=["demo", "random"])
def model(request: pytest.FixtureRequest, models: Models, tmp_path_factory: Any) -> Iterator[Model]:
    if request.param == "random":
        yield models(Tiny(context=512), ks=(3,))
    else:
        folder = export(demo_checkpoint(), tmp_path_factory.mktemp("demo") / "b", (16,), dialects=ORT).folder
        with load(folder, device="cpu", threads=THREADS) as demo:
            yield demo


@pytest.fixture(scope="module")
def loaded(model: Model) -> Iterator[Loaded]:
    """libvtx finds llguidance in the wheel: this process has the symbols of Python that the wheel's library needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VTX_LLGUIDANCE", str(Path(llguidance.__file__).parent / "_lib.abi3.so"))
        held = Loaded(model.bundle.folder, "cpu")
        yield held
        held.close()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("picture") / "a.png"
    random_image(1).save(path)
    return path


def both(
    model: Model, loaded: Loaded, picture: Path, kind: str, value: Any, temperature: float, seed: int
) -> tuple[dict[str, Any], Any]:
    """The answers of libvtx and of Python."""
    text = value if kind in ("regex", "grammar") else json.dumps(value)
    [found] = loaded.ask(
        [picture], [QUESTION], guide_kind=kind.encode(), guide=text.encode(), max_new_tokens=TOKENS,
        temperature=temperature, has_seed=1, seed=seed,
    )  # fmt: skip
    with model.open(picture) as image:
        settings: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": temperature, "seed": seed, kind: value}
        return found, image.ask(QUESTION, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("choices", ["red", "red circle", "", "Größe\n\"'\\"]),
        ("regex", "(there is (a|one) )?[a-f]{3}(!|[?]{2})/\\/é"),
        ("grammar", 'start: "there is " thing ("," thing)*\nthing: "the " /[a-z]{2,6}/'),
        ("schema", True),
    ],
)
def test_answers_have_the_ids_of_python(
    model: Model, loaded: Loaded, picture: Path, kind: str, value: Any, temperature: float
) -> None:
    for seed in range(3):
        found, answer = both(model, loaded, picture, kind, value, temperature, seed)
        assert (found["token_ids"], found["text"]) == (list(answer.token_ids), answer.text)
        assert found["stopped"] == answer.stopped


def test_answers_under_random_schemas_have_the_ids_of_python_and_validate(
    model: Model, loaded: Loaded, picture: Path
) -> None:
    ended = 0
    for number in range(60):
        schema = random_schema(Random(number))
        found, answer = both(model, loaded, picture, "schema", schema, float(number % 2), number)
        assert found["token_ids"] == list(answer.token_ids), schema
        if found["stopped"] == "end":
            ended += 1
            jsonschema.validate(json.loads(found["text"]), schema)
    assert ended > 30


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "((", "regex cannot guide an answer: .*unclosed"),
        ("schema", '{"type": "picture"}', "schema cannot guide an answer: .*picture"),
        ("schema", '{"$ref": "#"}', "schema allows no answer"),
        ("schema", "{", "the schema"),
        ("choices", "[]", "at least one string"),
        ("choices", '[" a"]', "without whitespace at its start"),
        ("choices", "[1]", "not a string"),
        ("picture", "a", "0 of schema"),
        ("regex", "a" * 5000, "5,000 bytes, the limit is 4,096"),
        ("grammar", "\xff", "grammar"),
    ],
)
def test_what_cannot_guide_an_answer_is_refused(
    model: Model, loaded: Loaded, picture: Path, kind: str, text: str, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        loaded.ask([picture], [QUESTION], guide_kind=kind.encode(), guide=text.encode("latin-1"))
