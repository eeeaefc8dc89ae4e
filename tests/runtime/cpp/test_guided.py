"""Guided answers of libvtx: the token ids of Python under the same form, sampling and bundle."""

from __future__ import annotations

import dataclasses
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from benchmarks import schemas

from tests.support.bundles import export
from tests.support.cabi import Loaded
from tests.support.cpp import DEVICES, needs_cpp, run
from tests.support.exported import THREADS, Models
from tests.support.guided import EXPLODING, LONG, plain_scores
from tests.support.serving import serving, user
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.prepare import demo_checkpoint
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.prompt import guiding

llguidance = pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]
QUESTION, TOKENS = "How many shapes are there?", 60


@pytest.fixture(scope="module", params=["demo", "random"])
def model(request: pytest.FixtureRequest, models: Models, tmp_path_factory: Any) -> Iterator[Model]:
    if request.param == "random":
        yield models(Tiny(context=512, kv_heads=4), ks=(3,))  # multi-head; the demo's queries are grouped
    else:
        folder = export(
            demo_checkpoint(), tmp_path_factory.mktemp("demo") / "b", (16,), dialects=("ort", "plain")
        ).folder
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


@pytest.mark.sampled
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
        assert (found["stopped"], found["forced"]) == (answer.stopped, answer.stats.forced)
        assert answer.stats.imposed is not None
        imposed = dataclasses.asdict(answer.stats.imposed)
        assert found["imposed"].keys() == imposed.keys()
        for name, own in imposed.items():
            assert found["imposed"][name] == (None if own is None else pytest.approx(own, rel=1e-4)), name
        if kind == "choices":
            assert found["choices_mass"] == pytest.approx(answer.choices_mass, rel=1e-3)


@pytest.mark.slow
def test_answers_under_random_schemas_validate_and_have_the_ids_of_python_and_of_the_server(
    model: Model, loaded: Loaded
) -> None:
    """A sample of what `benchmarks/schemas.py` asks by the thousand."""
    asked = schemas.cases(0, 48, ["m"])
    with serving({"m": model.bundle.folder}) as served, model.open(random_image(1)) as image:
        message = user(schemas.QUESTION, random_image(1))
        ways = {"python": schemas.by_python({"m": image}), "server": schemas.by_server(served.chat, message, 4)}
        ways["libvtx"] = schemas.by_libvtx({"m": loaded.opened(random_image(1))})
        counts, faults = schemas.compared(asked, ways)
        assert faults == []
        assert counts["m, greedy, end"] > 10
        assert counts["m, sampled, end"] > 10
        assert counts["forced"] > 200
        ways["libvtx"] = lambda asked: [said._replace(stopped="end") for said in ways["python"](asked)]
        cut = counts["m, greedy, length"] + counts["m, sampled, length"]
        assert len(schemas.compared(asked, ways)[1]) == cut > 0, "an answer that was cut is called complete"


def test_forced_runs_end_where_the_answer_is_cut(model: Model, loaded: Loaded, picture: Path) -> None:
    sure = {"const": "the picture is a red square"}
    whole, _ = both(model, loaded, picture, "schema", sure, 0.0, 0)
    for tokens in range(1, len(whole["token_ids"])):
        [cut] = loaded.ask(
            [picture], [QUESTION], guide_kind=b"schema", guide=json.dumps(sure).encode(), max_new_tokens=tokens
        )
        assert (cut["stopped"], cut["token_ids"]) == ("length", whole["token_ids"][:tokens])
        assert cut["forced"] == max(0, tokens - 2)


@DEVICES
def test_the_probabilities_of_choices_are_those_of_plain_scoring(
    model: Model, loaded: Loaded, picture: Path, device: str
) -> None:
    choices = ["5", "4", "red", "red circle", "", "a picture of a square", "Größe\n<image>"]
    other = Loaded(model.bundle.folder, device)
    sampling: dict[str, Any] = {"seed": 3, "temperature": 0.8}
    guide = {"guide_kind": b"choices", "guide": json.dumps(choices).encode()}
    found = other.ask([picture], [QUESTION, "red?", QUESTION], turns={1, 2}, has_seed=1, **sampling, **guide)
    other.close()
    with load(model.bundle.folder, device=device, threads=THREADS) as python, python.open(picture) as image:
        chat, sampling = image.chat(), {**sampling, "choices": choices}
        answers = [image.ask(QUESTION, **sampling), chat.ask("red?", **sampling), chat.ask(QUESTION, **sampling)]
        plain = plain_scores(python, random_image(1), QUESTION, choices)
    assert list(found[0]["choices"]) == choices
    assert list(found[0]["choices"].values()) == pytest.approx(plain, abs=1e-4)
    for answer, known in zip(answers, found, strict=True):
        assert answer.choices is not None
        assert known["token_ids"] == list(answer.token_ids)
        assert known["choices"] == pytest.approx(answer.choices, abs=1e-4)
    many = loaded.ask(
        [picture], [QUESTION], guide_kind=b"choices", guide=json.dumps([str(n) for n in range(65)]).encode()
    )
    assert "choices" not in many[0]


def _written(given: dict[str, Any]) -> tuple[str, str]:
    [(kind, value)] = given.items()
    return kind, value if isinstance(value, str) else json.dumps(value)


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
        ("choices", '["a", "b", "a"]', "same string twice"),
        ("choices", json.dumps([str(n) for n in range(1025)]), "1,025 choices.*1,024"),
        *((*_written(given), said) for given, said in LONG.values()),
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


@pytest.mark.parametrize("name", EXPLODING)
def test_forms_that_explode_are_cut_or_end_in_an_error(model: Model, loaded: Loaded, picture: Path, name: str) -> None:
    kind, text = _written(EXPLODING[name])
    options = {"guide_kind": kind.encode(), "guide": text.encode(), "max_new_tokens": 30}
    try:
        [found] = loaded.ask([picture], [QUESTION], **options)
        assert found["stopped"] in ("length", "end")
    except AssertionError as e:
        assert re.search("simplify it|correct it", str(e))  # noqa: PT017 - it may also be cut


def test_compiled_grammars_are_kept_and_the_oldest_are_dropped(model: Model, loaded: Loaded, picture: Path) -> None:
    properties = {f"p{n}": {"type": "string", "pattern": "(a|b)*a(a|b){20}"} for n in range(900)}
    heavy = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    def spent(kind: str, value: Any) -> float:
        start = process_time()
        options = {"guide_kind": kind.encode(), "guide": json.dumps(value).encode(), "max_new_tokens": 1}
        loaded.ask([picture], [QUESTION], **options)
        return process_time() - start

    first = spent("schema", heavy)
    again = min(spent("schema", heavy) for _ in range(3))
    assert again < first / 2
    for n in range(guiding.KEPT):
        spent("choices", [str(n)])
    assert spent("schema", heavy) > 2 * again


def test_vtx_cpp_run_says_how_sure_it_is_and_that_an_answer_was_cut(
    model: Model, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, where the wheel's library finds the symbols of Python in Python's library."""
    python = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDLIBRARY"))
    if python.suffix != ".so":
        pytest.skip("this Python has no shared library, which llguidance's wheel would need outside of Python")
    monkeypatch.setenv("LD_PRELOAD", str(python))
    monkeypatch.setenv("VTX_LLGUIDANCE", str(Path(llguidance.__file__).parent / "_lib.abi3.so"))
    with model.open(picture) as image:
        answer = image.ask(QUESTION, choices=["red", "a,b", ""])
    assert answer.choices is not None
    words = ("--bundle", model.bundle.folder, "--threads", "1", picture, QUESTION)
    for choices in (json.dumps(["red", "a,b", ""]), "red,a,b"):
        done = run("run", *words, "--choices", choices)
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().strip() in ("red", "a,b", "", "a", "b")
    cut = run("run", *words, "--json-schema", '{"type": "string", "minLength": 40}', "--max-new-tokens", "4", "--json")
    assert cut.returncode == 3, cut.stderr
    assert json.loads(cut.stdout)["incomplete"] is True
    assert "cut before its form was complete; raise --max-new-tokens" in cut.stderr.decode()
    unsure = run("run", *words, "--choices", "red,blue", "--accept", "1")
    assert unsure.returncode == 0, unsure.stderr
    assert "unsure: the model gives '" in unsure.stderr.decode()
    for name in ("b.jpg", "c.PNG"):
        second = run("run", *words, name)
        assert second.returncode == 2
        assert f"'{name}' is a picture, not a question; use --image {name}" in second.stderr.decode()
        shares = [float(share) for share in re.findall(r" ([0-9.]+)%", done.stderr.decode())]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(100, abs=0.2)
        if choices.startswith("["):
            assert shares == pytest.approx(sorted((100 * p for p in answer.choices.values()), reverse=True), abs=0.06)
    cut = run("run", *words, "--regex", "[0-9]{9}", "--max-new-tokens", "1")
    assert b"cut before its form was complete" in cut.stderr
