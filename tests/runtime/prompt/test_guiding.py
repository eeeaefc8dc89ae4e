"""What an answer may be guided by: limits, refusals, masks and forced tokens."""

from __future__ import annotations

import builtins
import json
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.guided import EXPLODING, LONG
from tests.support.text import make_text
from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.prompt import guiding
from vtx.runtime.prompt.guiding import BYTES, KEPT, MAX_CHOICES, Grammars, Guide, GuidedAnswer
from vtx.runtime.prompt.text import Text

llguidance = pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
OBJECT = {
    "type": "object", "properties": {"picture": {"enum": ["cat", "dog"]}, "n": {"type": "integer"}},
    "required": ["picture", "n"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "first", "normalizer", "never"])
def text(request: pytest.FixtureRequest) -> Text:
    return make_text(request.param)


@pytest.fixture(scope="module")
def grammars(text: Text) -> Grammars:
    return Grammars(text, vocab_of(text))


def vocab_of(text: Text) -> int:
    return text.tokenizer.get_vocab_size() + 7  # models have more than their tokenizers


def written(grammars: Grammars, text: Text, guide: Guide, *, seed: int = 0, most: int = 400) -> tuple[str, bool]:
    """An answer of tokens drawn at random from each mask, and whether it ended."""
    answer, ids, rng = grammars.start(guide), list[int](), np.random.default_rng(seed)
    for _ in range(most):
        logits = answer.mask(rng.normal(size=vocab_of(text)).astype(np.float32))
        ids.append(int(logits.argmax()))
        if answer.push(ids[-1]) or ids[-1] in text.settings.end_ids:
            return text.decode(ids).lstrip(), True
    return text.decode(ids).lstrip(), False


def test_random_tokens_under_the_masks_write_what_is_allowed(grammars: Grammars, text: Text) -> None:
    for seed in range(20):
        said, ended = written(grammars, text, Guide(choices=("a cat", "a", "picture of", "Größe 日")), seed=seed)
        assert ended
        assert said in ("a cat", "a", "picture of", "Größe 日")
        said, ended = written(grammars, text, Guide(regex=r"[ab]{2}/(x|yy)\."), seed=seed)
        assert ended
        assert said[:2] in ("aa", "ab", "ba", "bb")
        assert said[2:] in ("/x.", "/yy.")
        said, ended = written(grammars, text, Guide(grammar='start: "the " w\nw: "cat" | "picture " w'), seed=seed)
        assert not ended or said.endswith("cat")
        said, ended = written(grammars, text, Guide(schema=OBJECT), seed=seed)
        assert not ended or json.loads(said)["picture"] in ("cat", "dog")


def test_forced_tokens_are_known_beforehand_and_their_masks_hold_them_alone(grammars: Grammars, text: Text) -> None:
    answer, ids, drafts = grammars.start(Guide(schema=OBJECT)), list[int](), 0
    left: list[int] = []
    while not answer.complete and len(ids) < 300:
        mask = np.isfinite(answer.mask(np.zeros(vocab_of(text), np.float32)))
        if left:
            assert np.flatnonzero(mask).tolist() == left[:1]
        ids.append(int(mask.nonzero()[0][-1]))
        left = left[1:]
        if not answer.push(ids[-1]) and not left:
            left = answer.draft(64)
            drafts += len(left)
    assert drafts >= 8, "names and punctuation of an object are forced"


def test_a_grammar_is_compiled_once_and_the_oldest_are_dropped(text: Text, monkeypatch: Any) -> None:
    calls, compiled, matcher = list[Any](), list[Guide](), llguidance.LLMatcher
    monkeypatch.setattr(
        llguidance, "LLMatcher", lambda *args, **options: calls.append(args) or matcher(*args, **options)
    )
    grammars = Grammars(text, vocab_of(text))
    guides = [Guide(choices=(f"a{n}",)) for n in range(KEPT + 1)]
    for guide in (guides[0], guides[0], *guides[1:], guides[-1], guides[0]):
        calls.clear()
        assert isinstance(grammars.start(guide), GuidedAnswer)
        compiled += [guide] if calls else []
    assert compiled == [*guides, guides[0]]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "0 of schema, choices, regex, grammar"),
    "two": ({"choices": ["a"], "regex": "b"}, "2 of schema"),
    "no choice": ({"choices": []}, "at least one"),
    "a string of choices": ({"choices": "yes"}, "must be a list"),
    "a number among choices": ({"choices": ["a", 1]}, "1 is not a string"),
    "a choice twice": ({"choices": ["a", "a"]}, "twice"),
    "a choice that begins with a space": ({"choices": [" a"]}, "whitespace"),
    "too many choices": ({"choices": [str(n) for n in range(MAX_CHOICES + 1)]}, "1,025 choices.*1,024"),
    "long choices": ({"choices": ["a" * (BYTES["choices"] + 1)]}, "65,537 bytes.*65,536"),
    "half a surrogate": ({"choices": ["\ud800"]}, "surrogate"),
    "a long expression": ({"regex": "a" * 5000}, "5,000 bytes.*4,096"),
    "a long grammar": ({"grammar": "a" * 9000}, "9,000 bytes.*8,192"),
    "a large schema": ({"schema": {"enum": ["a" * 70_000]}}, "limit is 65,536"),
    "a schema that is no JSON": ({"schema": "{"}, "not JSON"),
    "a list as schema": ({"schema": "[1]"}, "must be a JSON object"),
    "infinity in a schema": ({"schema": {"minimum": float("inf")}}, "not JSON"),
    "a set in a schema": ({"schema": {"enum": {1}}}, "not JSON"),
    "a number as regex": ({"regex": 5}, "must be a string"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_guide_can_be_is_refused(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(RequestError, match=message):
        Guide(**given)


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(RequestError, match="not JSON"):
        Guide(schema=schema)
    with pytest.raises(RequestError, match="not JSON"):
        Guide(schema='{"items":' * 20_000 + "{}" + "}" * 20_000)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": ({"schema": {"type": "picture"}}, "schema cannot.*picture"),
    "a keyword that is not supported": ({"schema": {"uniqueItems": True}}, "uniqueItems"),
    "an address": ({"schema": {"$ref": "https://example.org/schema.json"}}, "example.org"),
    "a file": ({"schema": {"$ref": "file:///etc/passwd"}}, "etc/passwd"),
    "nothing allowed": ({"schema": False}, "schema cannot"),
    "a circle": ({"schema": {"$ref": "#"}}, "allows no answer"),
    "deep": ({"schema": '{"items":' * 200 + "{}" + "}" * 200}, "recursion|not JSON"),
    "a leniency of its own": ({"schema": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
    "an open bracket": ({"regex": "(("}, "regex cannot.*unclosed"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "no character": ({"regex": "[^\\s\\S]"}, "allows no answer"),
    "nested": ({"regex": "(" * 2000 + "a" + ")" * 2000}, "regex cannot"),
    "no start": ({"grammar": "a: /x/"}, "grammar cannot"),
    "an unknown rule": ({"grammar": "start: picture"}, "picture"),
    "only itself": ({"grammar": "start: start"}, "allows no answer"),
    **{f"minutes of work, {name}": refused for name, refused in LONG.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_guide_an_answer_is_refused_by_name(grammars: Grammars, name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        grammars.start(Guide(**given))


@pytest.mark.sampled
def test_a_form_that_becomes_too_large_ends_its_answer(grammars: Grammars, text: Text) -> None:
    answer = grammars.start(Guide(schema={"type": "object", "properties": {f"p{n}": {} for n in range(1500)}}))

    def write() -> None:
        for _ in range(9):
            answer.push(int(answer.mask(np.zeros(vocab_of(text), np.float32)).argmax()))

    with pytest.raises(RequestError, match=r"after token \d: .*max is 2000"):
        write()


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", EXPLODING)
def test_forms_that_explode_are_cut_or_end_in_an_error(grammars: Grammars, text: Text, name: str) -> None:
    """None of them takes minutes, which a test run would show."""
    try:
        _, ended = written(grammars, text, Guide(**EXPLODING[name]), most=30)
        assert not ended or name in ("an ambiguous grammar", "many places", "words")
    except RequestError as e:
        assert "simplify it" in str(e) or "correct it" in str(e)  # noqa: PT017 - it may also be cut


def chains(kind: str) -> Guide:
    """As many links as the limit of bytes allows, each of which refers to the next."""
    if kind == "schema":
        links = {f"{n:x}": {"$ref": f"#/$defs/{n + 1:x}"} for n in range(1600)}
        return Guide(schema={"$defs": {**links, "640": {"type": "null"}}, "$ref": "#/$defs/0"})
    name = "a" if kind == "rules" else "A"
    links_text = "\n".join(f"{name}{n:x}:{name}{n + 1:x}" for n in range(800))
    return Guide(grammar=f'start: {name}0\n{links_text}\n{name}320: "x"')


@pytest.mark.parametrize("kind", ["schema", "rules", "terminals"])
def test_the_longest_chains_do_not_end_the_process(grammars: Grammars, kind: str) -> None:
    """In a thread, whose stack is smaller than the first one's on some systems."""
    outcomes = list[object]()

    def work() -> None:
        try:
            outcomes.append(grammars.start(chains(kind)))
        except RequestError as e:
            outcomes.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(outcomes) == 1


def test_a_thousand_choices_and_characters_without_tokens_of_their_own(grammars: Grammars, text: Text) -> None:
    choices = tuple(f"{'the cat ' * (n % 5)}{n}" for n in range(1000))
    choices = tuple(choice.strip() for choice in choices)
    assert {written(grammars, text, Guide(choices=choices), seed=seed)[0] in choices for seed in range(5)} == {True}
    assert written(grammars, text, Guide(choices=("",)))[0] == ""
    assert written(grammars, text, Guide(choices=("😀\n\t\"\\'",))) == ("😀\n\t\"\\'", True), (
        "bytes stand for characters"
    )


def test_a_tokenizer_that_llguidance_does_not_read_is_named() -> None:
    text = make_text("words")
    with pytest.raises(RequestError, match=r"the tokenizer of this bundle \(\w+\) cannot guide answers"):
        Grammars(text, vocab_of(text))


def test_without_llguidance_the_extra_is_named(text: Text, monkeypatch: Any) -> None:
    importing = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[guided\]"'):
        guiding.Grammars(text, vocab_of(text))
