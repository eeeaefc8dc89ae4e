"""Guided answers: the tokens of masking one at a time, however they are computed, and always of the form asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from benchmarks.schemas import random_schema
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.bundles import ORT, export
from tests.support.exported import THREADS, Models, policy, prompt
from tests.support.guided import plain_scores
from tests.support.json_files import write_json
from tests.support.text import TEMPLATES, ask, make_text
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.prepare import demo_checkpoint
from vtx.runtime.api.answer import Answer
from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options, Settings
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt import guiding
from vtx.runtime.prompt.guiding import Grammars, Guide
from vtx.runtime.scheduler.batching import Batching
from vtx.runtime.session.sampling import Sampler, Sampling
from vtx.runtime.session.session import Session

pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
QUESTION, TOKENS = "How many shapes are there?", 60
SHAPE: dict[str, Any] = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["shape", "count"], "additionalProperties": False,
}  # fmt: skip
GUIDES = {
    "schema": Guide(schema=SHAPE),
    "choices": Guide(choices=("red", "red circle", "", "a circle in the picture")),
    "regex": Guide(regex="(there is (a|one) )?[a-f]{3}(!|[?]{2})"),
    "grammar": Guide(grammar='start: "there is " thing ("," thing)*\nthing: "the " /[a-z]{2,6}/'),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.5, seed=43),
    "penalised": Sampling(temperature=0.8, top_p=0.9, top_k=5, seed=3, repetition_penalty=1.4),
}


@pytest.fixture(scope="module", params=[pytest.param("demo", marks=pytest.mark.slow), "random"])
def model(request: pytest.FixtureRequest, models: Models, tmp_path_factory: Any) -> Iterator[Model]:
    if request.param == "random":
        yield models(Tiny(context=512, kv_heads=4), ks=(3,))  # multi-head; the demo's queries are grouped
    else:
        folder: Path = export(demo_checkpoint(), tmp_path_factory.mktemp("demo") / "b", (16,), dialects=ORT).folder
        with load(folder, device="cpu", threads=THREADS) as demo:
            yield demo


@pytest.fixture(scope="module")
def image(model: Model) -> Iterator[Conversation]:
    with model.open(random_image(1)) as conversation:
        yield conversation


def one_at_a_time(model: Model, guide: Guide, sampling: Sampling, most: int) -> tuple[list[int], str]:
    """Token ids of an answer and why it ended: a mask and a pass for each token, without any draft."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    asked = prompt(model, [message], [random_image(1)])
    session, ids = Session(model.backend, model.manifest), list[int]()
    logits = session.prefill(asked, policy(model.manifest.default_k)).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guiding, "GuidedAnswer", lambda matcher: matcher)  # llguidance's own object
        matcher: Any = Grammars(model.loaded.text, model.manifest.model.vocab).start(guide)
    sampler = Sampler(sampling, asked.ids.tolist())
    while True:
        forced = matcher.compute_ff_tokens()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: len(logits)]
        allowed = np.isin(np.arange(len(logits)), forced[:1]) if forced else bits.astype(bool)
        ids.append(sampler(np.where(allowed, logits, -np.inf).astype(np.float32)))
        assert matcher.consume_token(ids[-1])
        if ids[-1] in model.manifest.text.end_ids or matcher.is_stopped():
            return ids, "end"
        if len(ids) == most:
            return ids, "length"
        logits = session.decode(ids[-1])


@pytest.mark.covering(2)
@pytest.mark.parametrize("sampled", SAMPLINGS)
@pytest.mark.parametrize("name", GUIDES)
def test_tokens_are_those_of_masking_one_at_a_time(model: Model, image: Conversation, name: str, sampled: str) -> None:
    expected = one_at_a_time(model, GUIDES[name], SAMPLINGS[sampled], TOKENS)
    for lookup in (0, 4):
        options = Options(TOKENS, sampling=SAMPLINGS[sampled], guide=GUIDES[name], prompt_lookup=lookup)
        answer = image.ask(QUESTION, options=options)
        assert (list(answer.token_ids), answer.stopped) == expected


def test_answers_decoded_together_are_those_of_each_alone(model: Model) -> None:
    ways = [(guide, sampling) for guide in GUIDES.values() for sampling in SAMPLINGS.values()]
    alone, batching, streams = list[Answer](), Batching(model, 16, 16), list[Any]()
    assert batching.obstacle is None
    for guide, sampling in ways:
        with model.open(random_image(1)) as conversation:
            alone.append(conversation.ask(QUESTION, max_new_tokens=30, sampling=sampling, guide=guide))
    for guide, sampling in ways:
        conversation = model.open(random_image(1))
        answering = Settings(options=Options(30, sampling=sampling, guide=guide))
        streams.append(conversation.stream_messages(conversation.opening(QUESTION), answering))
    running = list(streams)
    while running:
        batching.decode(running)
        running = [stream for stream in running if _steps(stream)]
    assert batching.tokens > 10
    for stream, answer in zip(streams, alone, strict=True):
        assert (stream.answer.token_ids, stream.answer.stopped) == (answer.token_ids, answer.stopped)
        assert stream.answer.stats.forced == answer.stats.forced, "in as few passes"


def _steps(stream: Any) -> bool:
    try:
        stream.step()
    except StopIteration:
        return False
    return True


def test_forced_tokens_run_in_the_pass_of_the_token_before_them(
    model: Model, image: Conversation, monkeypatch: Any
) -> None:
    passes = list[int]()
    decode = Session.decode

    def counting(self: Session, token: int, draft: Any = ()) -> Any:
        passes.append(1 + len(draft))
        return decode(self, token, draft)

    monkeypatch.setattr(Session, "decode", counting)
    answer = image.ask(QUESTION, schema=SHAPE, max_new_tokens=TOKENS)
    assert answer.stats.forced == sum(passes) - len(passes) > 8
    assert len(answer.token_ids) - sum(passes) in (0, 1), "the last token needs no pass of its own"
    assert json.loads(answer.text)["shape"] in ("circle", "square")
    assert image.ask(QUESTION, max_new_tokens=4).stats.forced is None


@given(schemas=st.randoms(use_true_random=False).map(random_schema), seed=st.integers(0, 2**31), lookup=st.booleans())
@settings(max_examples=15)
def test_every_answer_that_ends_is_valid_under_its_schema(
    model: Model, image: Conversation, schemas: dict[str, Any], seed: int, lookup: bool
) -> None:
    for temperature in (0.0, 1.0):
        answer = image.ask(
            QUESTION, schema=schemas, max_new_tokens=TOKENS, temperature=temperature, seed=seed,
            prompt_lookup=4 if lookup else 0,
        )  # fmt: skip
        if answer.stopped == "end":
            jsonschema.validate(json.loads(answer.text), schemas)
        else:
            assert answer.stopped == "length"


def test_an_answer_that_is_cut_says_so_and_one_that_just_fits_is_complete(image: Conversation) -> None:
    whole = image.ask(QUESTION, schema=SHAPE)
    assert whole.stopped == "end"
    count = len(whole.token_ids)
    assert image.ask(QUESTION, schema=SHAPE, max_new_tokens=count).stopped == "end"
    for tokens in range(1, count):
        cut = image.ask(QUESTION, schema=SHAPE, max_new_tokens=tokens)
        assert (cut.stopped, cut.token_ids) == ("length", whole.token_ids[:tokens])


def test_a_cancelled_answer_leaves_the_conversation_as_it_was(image: Conversation) -> None:
    whole = image.ask(QUESTION, schema=SHAPE)
    for steps in range(2, len(whole.token_ids)):
        stream = image.stream(QUESTION, schema=SHAPE)
        for _ in range(steps):
            stream.step()
        stream.cancel()
        assert image.ask(QUESTION, schema=SHAPE).token_ids == whole.token_ids


def test_every_way_to_ask_takes_a_guide(model: Model, image: Conversation) -> None:
    assert image.chat().ask("red?", choices=["yes", "no"]).text in ("yes", "no")
    assert "".join(image.stream("red?", choices=["yes", "no"])) in ("yes", "no")
    assert model.generate([{"role": "user", "content": "red?"}], regex="[0-9]").text.isdigit()
    answers = model.batch([(random_image(1), "red?")] * 2, guide=Guide(choices=("yes", "no")))
    assert {answer.text for answer in answers} <= {"yes", "no"}


@pytest.mark.parametrize("changes", [{"stop": "a"}, {"ignore_eos": True}, {"choices": ["a"]}])
def test_settings_that_contradict_a_guide_are_refused(image: Conversation, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"leave .* out|2 of schema"):
        image.ask("red?", **({"regex": "a"} | changes))


def test_a_form_that_cannot_be_had_is_refused_before_anything_is_computed(image: Conversation) -> None:
    with pytest.raises(RequestError, match="unclosed"):
        image.stream("red?", regex="((")
    with pytest.raises(RequestError, match="must be a vtx"):
        image.stream("red?", guide="yes")  # type: ignore[arg-type]


def test_commands_guide_answers(model: Model, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from vtx.cli import batch, chat, run

    def said(command: Any, *words: Any, code: int = 0, typed: str | None = None, noted: bool = False) -> str:
        bundle = ["--bundle", str(model.bundle.folder), "--device", "cpu"]
        done = CliRunner().invoke(command, [*map(str, words), *bundle], input=typed)
        assert done.exit_code == code, done.output
        return done.stdout if code == 0 and not noted else done.output

    random_image(1).save(tmp_path / "a.png")
    write_json(tmp_path / "schema.json", SHAPE)
    (tmp_path / "form.lark").write_text('start: "a" | "b"')
    picture = tmp_path / "a.png"
    for schema in (tmp_path / "schema.json", json.dumps(SHAPE)):
        jsonschema.validate(json.loads(said(run, picture, QUESTION, "--json-schema", schema)), SHAPE)
    assert said(run, picture, QUESTION, "--choices", "yes,no").strip() in ("yes", "no")
    assert said(run, picture, QUESTION, "--choices", '["a,b", "c"]').strip() in ("a,b", "c")
    assert said(run, picture, QUESTION, "--regex", "[0-9]{3}").strip().isdigit()
    assert said(run, picture, QUESTION, "--grammar", tmp_path / "form.lark").strip() in ("a", "b")
    assert "%, " in said(run, picture, QUESTION, "--choices", "yes,no", noted=True)
    assert "cut before" in said(run, picture, QUESTION, "--regex", "[0-9]{9}", "--max-new-tokens", 1, code=3)
    assert said(chat, picture, "--choices", "yes,no", typed=f"{QUESTION}\n").strip() in ("yes", "no")
    assert "give one" in said(run, picture, QUESTION, "--regex", "a", "--choices", "b", code=1)
    assert "not a JSON list" in said(run, picture, QUESTION, "--choices", "[a", code=1)
    own = [{"schema": SHAPE}, {"regex": "[0-9]"}, {}, {"choices": "no list"}]
    lines = [json.dumps({"image": "a.png", "question": QUESTION, **line}) for line in own]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    said(batch, tmp_path / "q.jsonl", tmp_path / "answers.jsonl", "--choices", "yes,no", code=1)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    jsonschema.validate(json.loads(answers[0]["text"]), SHAPE)
    assert answers[1]["text"].isdigit()
    assert answers[2]["text"] in ("yes", "no")
    assert "must be a list" in answers[3]["error"]


@pytest.mark.parametrize("lookup", [0, 3])
def test_the_probabilities_of_choices_are_those_of_plain_scoring(
    model: Model, image: Conversation, lookup: int
) -> None:
    choices = ("5", "4", "red", "red circle", "", "a picture of a square")
    answer = image.ask(QUESTION, choices=choices, prompt_lookup=lookup)
    assert answer.choices is not None
    assert sum(answer.choices.values()) == pytest.approx(1)
    assert list(answer.choices) == list(choices)
    assert list(answer.choices.values()) == pytest.approx(
        plain_scores(model, random_image(1), QUESTION, choices), abs=1e-4
    )
    assert answer.to_dict()["choices"] == answer.choices
    assert image.ask(QUESTION, regex="a").choices is None
    many = image.ask(QUESTION, choices=[str(n) for n in range(65)])
    assert many.choices is None


def test_the_demo_is_sure_of_what_it_knows(model: Model) -> None:
    if "demo" not in model.manifest.model.name:
        pytest.skip("a random model knows nothing")
    scene = Path(__file__).parents[3] / "examples" / "scene-1.jpg"
    with model.open(scene) as image:
        answer = image.ask(QUESTION, choices=[str(n) for n in range(1, 10)])
        assert answer.choices is not None
        assert answer.text == max(answer.choices, key=lambda choice: answer.choices[choice]) == "5"
        assert answer.choices["5"] > 0.9


@pytest.mark.parametrize("kind", ["bytes", "first", "always", "never", "normalizer", "words"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_s_tokens_are_those_of_the_conversation_that_holds_it(kind: str, template: str) -> None:
    text = make_text(kind, TEMPLATES[template])
    question = ask("what is this?")
    before = text.prompt([question], 1).tolist()
    for answer in ("a cat", "the picture is"):
        whole = text.prompt([question, ask(answer, role="assistant")], 1, add_generation_prompt=False).tolist()
        ids = [*before, *text.answer_ids(answer)]
        assert whole[: len(ids)] == ids
