"""Answer, then fill in: the model answers freely, then each field of a form is asked for in the same conversation.

The keys and the punctuation of the JSON are written by vtx, not by the model, so nothing is imposed but the values. The
prompt of a field is the conversation up to the free answer and the field's question, which the caches hold up to there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from vtx.runtime.api.accepting import MAX_SCORED
from vtx.runtime.api.answer import Answer, FieldValue, Progress
from vtx.runtime.api.answering import AnswerInProgress
from vtx.runtime.api.options import Settings
from vtx.runtime.api.stream import AnswerStream
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.guiding import Guide
from vtx.runtime.prompt.messages import Message, texts_of, thinking_of

if TYPE_CHECKING:
    from vtx.runtime.session.session import Selection

Completed: TypeAlias = "Callable[[Answer, Selection | None], None]"
YES_NO = {"yes": True, "no": False}
# Keys of a form; others say what no single field can be held to.
FORM_KEYS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "title",
    "description",
    "$schema",
    "$id",
    "$defs",
    "definitions",
}
NOTES = {"title", "description", "default", "examples"}  # keys that restrict no value
LISTED_KEYS = {"type", "minimum", "maximum", *NOTES}


@dataclass(frozen=True, slots=True)
class FormField:
    """A field: its `question`, and the `values` that it may have by the text of each, or else its `schema`.

    Of a field without either any text will do.
    """

    name: str
    question: str
    values: Mapping[str, Any] | None = None
    schema: Mapping[str, Any] | None = None

    @property
    def guide(self) -> Guide | None:
        """The form of its answer."""
        if self.values is not None:
            return Guide(choices=tuple(self.values))
        return None if self.schema is None else Guide(schema=self.schema)

    def read(self, answer: Answer) -> FieldValue:
        """The value that an answer gives to it, and its probability."""
        if self.values is not None and answer.choices is not None:
            value = self.values[answer.text]
            return FieldValue(value, answer.choices[answer.text], answer.choices_mass)
        value = answer.text if self.schema is None else json.loads(answer.text)
        return FieldValue(value, math.exp(math.fsum(answer.logprobs or ())))


def read_form(schema: Mapping[str, Any], asked: str) -> list[FormField]:
    """The fields of a form, in order. A field that is alone, and has no description, is what was `asked`.

    Raises RequestError: it is not an object with properties, or asks for more.
    """
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, dict) or not properties:
        raise RequestError(
            'fill is for a schema that lists fields: {"type": "object", "properties": {...}}; leave fill out'
        )
    missing = [name for name in schema.get("required", ()) if name not in properties]
    beyond = sorted(schema.keys() - FORM_KEYS)
    if missing or beyond:
        names = ", ".join([*beyond, *(f"required: {name}" for name in missing)])
        raise RequestError(f"fill asks for each of the properties, and the schema has also {names:.80}; leave them out")
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    fields = [_field(name, of, definitions) for name, of in properties.items()]
    if len(fields) == 1 and not _description(properties[fields[0].name]):
        return [replace(fields[0], question=asked)]
    return fields


def _field(name: str, schema: Any, definitions: Mapping[str, Any]) -> FormField:
    question = _description(schema) or f"What is the {name.replace('_', ' ')}?"
    if not isinstance(schema, dict):
        return FormField(name, question, schema={"type": ["string", "number", "boolean", "null"]})
    values = _values(schema)
    if values is not None and 0 < len(values) <= MAX_SCORED:
        return FormField(name, question, values)
    if schema.get("type") == "string" and not schema.keys() - {"type", *NOTES}:
        return FormField(name, question)
    return FormField(name, question, schema={**schema, **definitions})


def _description(schema: Any) -> str:
    description = schema.get("description") if isinstance(schema, dict) else None
    return description.strip() if isinstance(description, str) else ""


def _values(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values of a closed field by their texts; None if it is open, or two of them read the same."""
    keys = schema.keys() - NOTES
    if "const" in schema or isinstance(schema.get("enum"), list):
        if keys - {"const", "enum", "type"}:
            return None
        return _by_text([schema["const"]] if "const" in schema else schema["enum"])
    if schema.get("type") == "boolean":
        return dict(YES_NO) if keys == {"type"} else None
    low = schema.get("minimum")
    high = schema.get("maximum")
    if schema.get("type") != "integer" or schema.keys() - LISTED_KEYS:
        return None
    if not isinstance(low, int) or not isinstance(high, int) or not 0 <= high - low < MAX_SCORED:
        return None
    return _by_text(range(low, high + 1))


def _by_text(listed: Sequence[Any]) -> dict[str, Any] | None:
    """Values by their texts; None if one is not a scalar, or two of them read the same."""
    if any(isinstance(value, dict | list) for value in listed):
        return None
    values = {value if isinstance(value, str) else json.dumps(value): value for value in listed}
    distinct = len(values) == len(listed) and all(text == text.lstrip() for text in values)
    return values if distinct else None


class FillingStream(AnswerStream):
    """The free answer, then one answer a field, as one stream, whose text is the JSON in one piece at its end.

    The cost is that of the free answer, the tokens are those of all answers.
    """

    def __init__(
        self,
        ask: Callable[..., AnswerStream],
        messages: Sequence[Message],
        settings: Settings,
        *,
        after: Selection | None = None,
        completed: Completed | None = None,
    ) -> None:
        """`ask`: `stream_messages` of the conversation. Raises RequestError for a schema that lists no fields."""
        options = settings.options
        guide = settings.options.guide
        assert guide is not None
        for name, value in (("logprobs", options.logprobs), ("temperature", options.sampling.temperature)):
            if value:
                raise RequestError(f"fill decodes each field by itself, greedily; leave {name} out")
        self._fields = read_form(json.loads(str(guide.schema)), "\n".join(texts_of(messages[-1])))
        self._ask = ask
        self._messages = list(messages)
        self._completed = completed
        self._settings = replace(settings, options=replace(options, guide=None))
        self._ends_at = math.inf
        self._answers = list[Answer]()
        self._values = dict[str, FieldValue]()
        self._selection: Selection | None = None
        self._whole: Answer | None = None
        super().__init__(self._begun(self._messages, self._settings, after=after, completed=self._selected))
        self._pieces = self._filled()

    @property
    def answer(self) -> Answer:
        """The complete answer. Raises RequestError before the end."""
        return super().answer if self._whole is None else self._whole

    def progress(self, start: int = 0) -> Progress:
        """The tokens so far, of all answers."""
        ids = [token for answer in self._answers for token in answer.token_ids]
        current = () if self._answering.answer in self._answers else self._answering.progress(0).token_ids
        return Progress(tuple([*ids, *current][start:]))

    def _begun(self, messages: Sequence[Message], settings: Settings, **more: Any) -> AnswerInProgress:
        return self._ask(messages, settings, **more).answering

    def _selected(self, _: Answer, selection: Selection | None) -> None:
        self._selection = selection

    def _filled(self) -> Generator[str]:
        """The steps of all answers, and the text at the end."""
        timeout = self._settings.options.timeout
        self._ends_at = math.inf if timeout is None else monotonic() + timeout
        try:
            yield from self._steps()
            reply: Message = {"role": "assistant", "content": [{"type": "text", "text": self._answers[0].text}]}
            for field in self._fields:
                if self._answers[-1].stopped in ("cancelled", "timeout"):
                    break
                if field.values is not None and len(field.values) == 1:  # there is nothing to ask
                    self._values[field.name] = FieldValue(next(iter(field.values.values())), 1.0)
                    continue
                turn: Message = {"role": "user", "content": [{"type": "text", "text": field.question}]}
                self._turn_to(field, [*self._messages, reply, turn])
                yield from self._steps()
                if self._answers[-1].stopped != "end":
                    break
                self._values[field.name] = field.read(self._answers[-1])
        finally:
            self._finish()
        yield self.answer.text

    def _turn_to(self, field: FormField, messages: Sequence[Message]) -> None:
        """Make the answer of a field the one that is computed."""
        options = self._settings.options
        before = self._answering
        left = None if self._ends_at == math.inf else max(1e-3, self._ends_at - monotonic())
        options = replace(options, guide=field.guide, logprobs=True, timeout=left, stop=())
        if thinking_of(self._messages):  # a field is answered at once
            options = replace(options, thinking=False)
        answering = self._begun(messages, replace(self._settings, options=options), resume=True, after=self._selection)
        answering.stream = before.stream
        answering.beat = before.beat
        answering.reader = before.reader
        answering.returns_by_itself = before.returns_by_itself
        answering.cancelled = before.cancelled
        self._answering = answering

    def _steps(self) -> Generator[str]:
        """The steps of the answer that is computed, without its text."""
        answering = self._answering
        try:
            for _ in answering.pieces():
                yield ""
        finally:
            if answering.answer is not None:
                self._answers.append(answering.answer)

    def _finish(self) -> None:
        """Put the answer together, as far as it has come."""
        if not self._answers:
            return
        free = self._answers[0]
        last = self._answers[-1]
        stopped = last.stopped if len(self._answers) > 1 or last.stopped in ("cancelled", "timeout") else "cancelled"
        forced = sum(answer.stats.forced or 0 for answer in self._answers)
        self._whole = replace(
            free,
            text=json.dumps({name: field.value for name, field in self._values.items()}, ensure_ascii=False),
            token_ids=tuple(token for answer in self._answers for token in answer.token_ids),
            stats=replace(free.stats, forced=forced),
            stopped=stopped,
            fields=self._values,
            free_text=free.text,
        )
        if self._completed is not None and stopped == "end":
            self._completed(self._whole, self._selection)
