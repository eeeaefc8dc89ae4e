"""Guided decoding: answers held to choices, a regular expression, a JSON schema or a grammar, by llguidance."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.errors import DeviceError, RequestError
from vtx.runtime.installing import install
from vtx.runtime.prompt.tokenizer import rust_errors
from vtx.runtime.prompt.tools import Tools

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from vtx.runtime.prompt.lookup import PromptLookup
    from vtx.runtime.prompt.text import Text
    from vtx.runtime.prompt.thoughts import ThoughtDivider

Schema = Mapping[str, Any] | str | bool
MAX_SCHEMA = 64 << 10  # bytes as UTF-8 text; of all choices as of a schema
MAX_REGEX = 4 << 10
MAX_GRAMMAR = 8 << 10
BYTES = {"schema": MAX_SCHEMA, "choices": MAX_SCHEMA, "regex": MAX_REGEX, "grammar": MAX_GRAMMAR, "tools": MAX_SCHEMA}
MAX_CHOICES = 1024
KEPT = 32  # compiled grammars of a bundle
# llguidance's limits: of the work to compile a grammar, of each mask's, and of an answer's memory, 1 to 2 KB a state.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
# What these limits do not count, and llguidance compiles for minutes: several expressions for one text, remainders.
MAX_COMBINED = 8
MAX_MULTIPLE = 10_000
MAX_OPERATORS = 1
OWN_KEYS = (
    "pattern",
    "format",
    "multipleOf",
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
)
# JSON as Python's json writes it: models know it, and no answer fills up with blanks.
JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the answer; give exactly one of the five.

    Args:
        schema: a JSON schema, as an object or JSON text; the answer is valid JSON for it. True: any JSON.
        choices: the answer is one of these texts. With at most 64, `Answer.choices` has the probability of each.
        regex: a regular expression (in Rust's syntax) that matches the whole answer.
        grammar: a grammar in llguidance's variant of Lark.
        tools: functions that the answer may call, as a list in OpenAI's format or as `vtx.Tools`.
        schema_in_prompt: the schema follows the question, so that the model knows the form before it writes it.
        fill: the model answers freely; then each property of the schema, which must be an object's, is asked for in the
            same conversation by its description, or else by its name, or by the question again if there is no other.
            Properties with at most 64 values are choices.
            `Answer.fields` has the probability of each, `Answer.free_text` the free answer.

    Raises:
        RequestError: none or more than one is given, or a value has the wrong type or exceeds a limit.

    """

    schema: Schema | None = None  # kept as JSON text
    choices: Sequence[str] | None = None
    regex: str | None = None
    grammar: str | None = None
    tools: Tools | Sequence[Mapping[str, Any]] | None = None  # kept as Tools
    schema_in_prompt: bool = False
    fill: bool = False

    def __post_init__(self) -> None:
        ways = [name for name in ("schema_in_prompt", "fill") if getattr(self, name)]
        if ways and self.schema is None:
            raise RequestError(f"{ways[0]} is for a schema; give one, or leave {ways[0]} out")
        if len(ways) > 1:
            raise RequestError("schema_in_prompt and fill are mutually exclusive; leave one out")
        constraints = [name for name in BYTES if getattr(self, name) is not None]
        if len(constraints) != 1:
            raise RequestError(f"{len(constraints)} of {', '.join(BYTES)} are given to guide an answer; give one")
        kind = constraints[0]
        value = getattr(self, kind)
        if kind in _READERS:
            value = _READERS[kind](value)
            object.__setattr__(self, kind, value)
        if kind == "choices":
            value = "".join(value)
        elif kind == "tools":
            value = value.functions
        if not isinstance(value, str):
            raise RequestError(f"{kind} is {value!r:.40}; it must be a string")
        try:
            size = len(value.encode())
        except UnicodeEncodeError as e:
            raise RequestError(f"{kind} holds half a surrogate pair at character {e.start}; leave it out") from e
        if size > BYTES[kind]:
            raise RequestError(f"{kind} has {size:,} bytes, the limit is {BYTES[kind]:,}; give a shorter one")

    @property
    def kind(self) -> str:
        """The name of the given constraint."""
        return next(name for name in BYTES if getattr(self, name) is not None)

    @property
    def listed_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, as the template prints them."""
        return self.tools.listed if isinstance(self.tools, Tools) else []


def _schema_text(schema: Schema) -> str:
    """A schema as JSON text."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as e:
        raise RequestError(f"the schema is not JSON ({' '.join(str(e).split()):.80}); correct it") from e
    if not isinstance(value, Mapping | bool):
        raise RequestError(f"the schema is {text:.40}; it must be a JSON object, true or false")
    return text


def _checked_choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"choices is {choices!r:.40}; it must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"{len(choices):,} choices are given, the limit is {MAX_CHOICES:,}; give fewer")
    for choice in choices:
        if not isinstance(choice, str) or choice != choice.lstrip():
            raise RequestError(
                f"the choice {choice!r:.40} is not a string without whitespace at its start; answers have none"
            )
    if len(set(choices)) < len(choices):
        raise RequestError("choices holds the same string twice; leave one out")
    return tuple(choices)


def _tools(tools: Tools | Sequence[Mapping[str, Any]]) -> Tools:
    return tools if isinstance(tools, Tools) else Tools(tools)


# How the value of a constraint is read, where it may have several forms.
_READERS: Mapping[str, Callable[[Any], Any]] = {"schema": _schema_text, "choices": _checked_choices, "tools": _tools}


def of_gbnf(text: str) -> str:
    """A grammar in llama.cpp's GBNF as `Guide.grammar`.

    Raises RequestError: it is not one, or too long; DeviceError: llguidance is not installed.
    """
    Guide(grammar=text)
    converter = _llguidance().gbnf_to_lark
    try:
        converted: str = converter.gbnf_to_lark(text)
    except (converter.GbnfToLarkError, LookupError, ValueError, RecursionError) as e:
        raise RequestError(f"the grammar is not GBNF: {_line(str(e))}; correct it") from e
    return converted


def _llguidance() -> Any:
    """The library. Raises DeviceError if it is not installed."""
    try:
        import llguidance
        import llguidance.gbnf_to_lark
    except ImportError as e:
        raise DeviceError(f"guided answers need llguidance, which is not installed; {install('guided')}") from e
    return llguidance


class Grammars:
    """The compiled grammars of a bundle's tokenizer, the least recently used dropped; safe for many threads.

    Raises DeviceError: llguidance is not installed; RequestError: llguidance does not read the tokenizer.
    """

    def __init__(self, text: Text, vocab: int) -> None:
        llguidance = _llguidance()
        self._library = llguidance
        self._space = text.may_begin_with_space
        self._lock = threading.Lock()
        self._text = text
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()
        model = type(text.tokenizer.model).__name__
        spec = json.loads(text.tokenizer.to_str())
        parts = spec["normalizer"] or {}
        parts = parts.get("normalizers", [parts] if parts else [])
        # Normalizers that change text, e.g. to lower case, would write forced text otherwise than it must be.
        kept = [part for part in parts if part["type"] == "Prepend" or part.get("pattern") == {"String": " "}]
        spec["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
        with rust_errors(RequestError, f"the tokenizer of this bundle ({model}) cannot guide answers, leave it out"):
            self._tokenizer = llguidance.LLTokenizer(
                json.dumps(spec), n_vocab=vocab, eos_token=sorted(text.settings.end_ids)
            )

    def start(self, guide: Guide) -> GuidedAnswer:
        """A new answer in this form.

        Raises RequestError: what is given cannot be compiled, is beyond the limits, or allows no answer.
        """
        with self._lock:
            matcher = self._compiled.pop(guide, None)
            matcher = self._compile(guide) if matcher is None else matcher
            self._compiled[guide] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return GuidedAnswer(matcher.deep_copy())

    def _compile(self, guide: Guide) -> LLMatcher:
        library = self._library
        kind = guide.kind
        body: dict[str, Any] = {"lark_grammar": guide.grammar}
        if guide.schema is not None:
            schema = json.loads(str(guide.schema))
            body = {"json_schema": {**schema, "x-guidance": JSON_FORM} if isinstance(schema, dict) else schema}
            body = {"json_schema": {"x-guidance": JSON_FORM}} if schema is True else body
        elif guide.choices is not None:
            body = {"lark_grammar": "start: " + " | ".join(json.dumps(choice) for choice in guide.choices)}
        elif guide.regex is not None:
            body = json.loads(library.LLMatcher.grammar_from_regex(guide.regex))["grammars"][0]
        elif isinstance(guide.tools, Tools):
            added = {token.content: token.special for token in self._text.tokenizer.get_added_tokens_decoder().values()}
            body = {"lark_grammar": self._text.call_form.grammar(guide.tools, JSON_FORM, added)}
        _check_work(kind, body)
        limits = library.LLParserLimits(**LIMITS, verbose_errors=False)

        def compiled(grammars: list[dict[str, Any]]) -> LLMatcher:
            matcher: LLMatcher = library.LLMatcher(
                self._tokenizer, json.dumps({"grammars": grammars}), log_level=0, limits=limits
            )
            if error := matcher.get_error():
                error = error.partition("\n")[0] if kind == "tools" else error  # what follows is not the user's text
                raise RequestError(f"{kind} cannot guide an answer: {_line(error)}; correct it")
            return matcher

        first = compiled([body])
        if not any(first.compute_bitmask()) or first.is_error():
            raise RequestError(f"{kind} allows no answer ({_line(first.get_error())}); correct it")
        start = {"lark_grammar": "start: / ?/ @body"}
        return compiled([start, {**body, "name": "body"}] if self._space else [body])


class GuidedAnswer:
    """One answer held to a grammar: a mask for each token, and drafts of the tokens that the grammar forces.

    A forced token's mask holds it alone, so that a model writes names and punctuation in its usual tokens. `complete`:
    nothing more may follow. `forced` counts the tokens that ran in the pass of an earlier one. `imposes`: the
    form left one token, or masked the model's most likely one. `lookup` drafts if nothing is forced.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._forced = matcher.compute_ff_tokens()
        self._drafting = False
        self.lookup: PromptLookup | None = None
        self.complete = False
        self.tokens = 0
        self.forced = 0
        self.imposes = False  # of the last mask

    def behind(self, thoughts: ThoughtDivider) -> DraftsBehindThought:
        """The drafts of this answer where its form begins behind a thought."""
        return DraftsBehindThought(self, thoughts)

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [vocab], minus infinity for tokens that may not come next.

        Raises RequestError: the grammar became too large, or no token can continue the answer.
        """
        allowed = np.zeros(len(logits), bool)
        if self._forced:
            allowed[self._forced[0]] = True
        else:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed[: len(bits)] = bits[: len(logits)]
            self._check()
        self.imposes = not allowed[logits.argmax()] or np.count_nonzero(allowed) == 1
        return np.where(allowed, logits, np.float32(-np.inf))

    def push(self, token: int) -> bool:
        """One more token of the answer; True if nothing may follow it. Raises as `mask` does."""
        self._matcher.consume_token(token)
        self._check()
        self.tokens += 1
        self.complete = self._matcher.is_stopped()
        self._forced = [] if self.complete else self._forced[1:] or self._matcher.compute_ff_tokens()
        if self.lookup is not None:
            self.lookup.push(token)
        return self.complete

    def accept(self) -> None:
        """The token last pushed is the draft's next one."""
        if self.lookup is not None and not self._drafting:
            self.lookup.accept()

    def draft(self, most: int) -> list[int]:
        """Tokens to verify in one pass, at most `most`: those that are forced, or else those that are looked up."""
        self._drafting = bool(self._forced)
        if self._drafting:
            draft = self._forced[:most]
            self.forced += len(draft)
            return draft
        return [] if self.lookup is None else self.lookup.draft(most)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the answer's form cannot be held to after token {self.tokens}: {_line(self._matcher.get_error())}; "
                "simplify it"
            )


def _check_work(kind: str, body: Mapping[str, Any]) -> None:
    """Refuse what would be compiled for minutes. Raises RequestError."""
    schemas = [body.get("json_schema")]
    grammar = str(body.get("lark_grammar", ""))
    for operator in "&~" if kind == "grammar" else "":
        count = grammar.count(operator)
        if count > MAX_OPERATORS:
            raise RequestError(
                f"grammar has {count} times {operator}, the limit is {MAX_OPERATORS}; "
                f"combine fewer expressions, and write \\x{ord(operator):x} in texts"
            )
    for start in re.finditer("%json", grammar):  # maybe inside of another one's text
        with suppress(ValueError):  # llguidance says what is wrong
            schemas.append(json.JSONDecoder().raw_decode(grammar[start.end() :].lstrip())[0])
    remainders = 0.0
    for schema in schemas:
        work = _schema_work(schema)
        if work.combined and work.patterns > MAX_COMBINED:
            raise RequestError(
                f"{kind} has {work.patterns} patterns and formats and combines some by allOf, anyOf or $ref; "
                f"the limit is then {MAX_COMBINED}; simplify it"
            )
        remainders += math.prod(work.multiples) if work.combined else sum(work.multiples) - 1
        if remainders > MAX_MULTIPLE:
            raise RequestError(
                f"{kind} asks for multiples of {min(remainders, 1e15):,.0f}, the limit is {MAX_MULTIPLE:,}; "
                "leave multipleOf out"
            )


class _SchemaWork(NamedTuple):
    """The work of compiling a schema: patterns, the remainders of multiples, and whether parts are combined."""

    patterns: int
    multiples: set[float]
    combined: bool


def _schema_work(schema: Any) -> _SchemaWork:
    patterns = 0
    multiples = {1.0}
    combined = False
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        if not isinstance(node, dict):
            continue
        nodes += node.values()
        patterns += sum(isinstance(node.get(key), str) for key in ("pattern", "format"))
        multiple = node.get("multipleOf")
        several = node.get("allOf")
        if isinstance(multiple, int | float) and multiple > 0:
            digits = re.sub(r"e.*|[.]", "", json.dumps(multiple))
            multiples.add(max(float(multiple), float(digits)))
        parts = sum(key in node for key in ("$ref", "anyOf", "oneOf")) + any(key in node for key in OWN_KEYS)
        combined |= parts + (len(several) if isinstance(several, list) else 0) > 1
    return _SchemaWork(patterns, multiples, combined)


def _line(error: str) -> str:
    """The first lines of an error of llguidance, on one."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:200]


class DraftsBehindThought:
    """The drafts of a guided answer whose form begins behind a thought."""

    def __init__(self, guided: GuidedAnswer, divider: ThoughtDivider) -> None:
        self._guided = guided
        self._divider = divider

    def push(self, token: int) -> bool:
        """One more token; True if nothing may follow it."""
        return False if self._divider.inside else self._guided.push(token)

    def accept(self) -> None:
        """The token last pushed is the draft's next one."""
        self._guided.accept()

    def draft(self, most: int) -> list[int]:
        """Tokens to verify in one pass, none in a thought."""
        return [] if self._divider.inside else self._guided.draft(most)
