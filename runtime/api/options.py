"""The settings of a question: limits and sampling of its answer, K, reductions; as objects or as keywords."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from vtx.runtime.api.accepting import read_accept
from vtx.runtime.checks import check_number, check_text, check_whole
from vtx.runtime.errors import RequestError
from vtx.runtime.policies.make import read_rest
from vtx.runtime.session.sampling import Sampling

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import Guide, Schema
    from vtx.runtime.prompt.tools import Tools

K = int | str | None
DEFAULT = "default"
MAX_STOPS = 16
MAX_DRAFT = 64  # tokens that are verified in one pass
MAX_ABOUT = 10_000  # characters
BLANK = " \t\r\n"
MAX_PRIORITY = 10
MAX_LIKELY = 20  # tokens that log probabilities are given of in one place


@dataclass(frozen=True, slots=True)
class Options:
    """Limits and sampling of one answer.

    Args:
        max_new_tokens: maximum tokens per answer.
        min_new_tokens: tokens before which the answer neither ends nor a stop string is looked for; 0: none.
        ignore_eos: continue past end tokens.
        sampling: how tokens are drawn.
        gate_threshold: with K "auto", the gate probability above which the image tokens are dropped.
        stop: stop strings; the answer ends before the first one found.
        logprobs: return the log probability of each answer token.
        top_logprobs: with `logprobs`, also return this many of the most likely tokens at each position.
        prompt_logprobs: also return the log probability of each token of the prompt's text after its last image, and
            this many of the most likely ones there; None: none. Nothing of an earlier prompt's text is reused then.
        prompt_lookup: draft up to this many tokens by looking them up in the prompt and the answer so far, and verify
            them in one pass; 0: off. The tokens are the same as without it, unless logits are tied within rounding.
        about: text by which CDPruner, and DART before layer 1, select image tokens instead of the question; in a chat,
            that of the first turn. None: the question.
        guide: constraint on the answer: a JSON schema, choices, a regular expression or a grammar.
        timeout: time limit in seconds from the first read of an answer to its end, including waiting for others; None:
            no limit.
        priority: rank from -10 to 10 among the calls that wait for one conversation. A step is worth one place: it lets
            the call go before one that came earlier. In `vtx-serve` a step is worth a 40th of the request's time.
        rest: image tokens that stay from K on, those that the prompt's last token attends to most: a share of them,
            "10%" or 0.1, or a number, 57. None: the rest of the bundle's card with the card's K, else no rest.
        accept: with choices, the probability that the model must give to its answer; below it `Answer.unsure` says why.
            "card": the threshold that `vtx-eval --coverage` wrote into the bundle's card. None: answers are not judged.
        boxes: also give the boxes that the answer names, in the pixels of the picture (`Answer.boxes`).
        thinking: True or False switches the thought before the answer on or off (`Answer.thought`); None: as the chat
            template has it.
        max_thinking_tokens: tokens of the thought after which it is ended, part of `max_new_tokens`; None: no limit.

    Raises:
        RequestError: a value of the wrong type or out of range.

    """

    max_new_tokens: int = 256
    ignore_eos: bool = False
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    gate_threshold: float = 0.5
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    timeout: float | None = None
    top_logprobs: int = 0
    prompt_lookup: int = 0
    about: str | None = None
    guide: Guide | None = None
    priority: int = 0
    rest: str | float | None = None
    accept: str | float | None = None
    boxes: bool = False
    thinking: bool | None = None
    max_thinking_tokens: int | None = None
    min_new_tokens: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}; it must be at most {self.max_new_tokens}, the maximum "
                "tokens of the answer"
            )
        for name in ("ignore_eos", "logprobs", "boxes"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r:.40}; it must be True or False")
        self._check_thinking()
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"sampling is {self.sampling!r:.40}; it must be a vtx.Sampling")
        check_number("the gate threshold", self.gate_threshold, "a probability from 0 to 1", least=0, most=1)
        for name in ("top_logprobs", "prompt_logprobs"):
            count = getattr(self, name) or 0
            check_whole(name, count, 0)
            if count > MAX_LIKELY:
                raise RequestError(f"{name} is {count}; at most {MAX_LIKELY} are given")
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs} without logprobs; ask for logprobs, too")
        check_whole("prompt_lookup", self.prompt_lookup, 0)
        if self.prompt_lookup > MAX_DRAFT:
            raise RequestError(f"prompt_lookup is {self.prompt_lookup}; drafts have at most {MAX_DRAFT} tokens")
        object.__setattr__(self, "stop", _stops(self.stop))
        self._check_about()
        self._check_guide()
        if self.timeout is not None:
            check_number("timeout", self.timeout, "a number of seconds above 0 and at most 1e6", least=1e-9, most=1e6)
        check_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.rest is not None:
            object.__setattr__(self, "rest", read_rest(self.rest))
        if self.accept is not None:
            object.__setattr__(self, "accept", read_accept(self.accept, self.guide))

    def _check_thinking(self) -> None:
        if not isinstance(self.thinking, bool | None):
            raise RequestError(f"thinking is {self.thinking!r:.40}; it must be True, False or None")
        if self.max_thinking_tokens is not None:
            check_whole("max_thinking_tokens", self.max_thinking_tokens, 1)

    def _check_about(self) -> None:
        if self.about is None:
            return
        check_text("about", self.about)
        if not self.about.strip(BLANK):
            raise RequestError("about is empty; give the text by which image tokens are chosen, or leave it out")
        if len(self.about) > MAX_ABOUT:
            raise RequestError(f"about has {len(self.about):,} characters, the limit is {MAX_ABOUT:,}; shorten it")

    def _check_guide(self) -> None:
        if self.guide is None:
            return
        from vtx.runtime.prompt.guiding import Guide

        if not isinstance(self.guide, Guide):
            raise RequestError(f"guide is {self.guide!r:.40}; it must be a vtx.Guide")
        for name in ("stop", "ignore_eos", "min_new_tokens"):
            if getattr(self, name):
                raise RequestError(f"{self.guide.kind} determines where the answer ends; leave {name} out")


def _stops(stop: object) -> tuple[str, ...]:
    """The texts that end an answer, given as one or as a list of them."""
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
        raise RequestError(f"stop is {stop!r:.40}; it must be a string, or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are allowed")
    return tuple(stops)


class GuideKeywords(TypedDict, total=False):
    """The fields of `Guide` as keywords."""

    schema: Schema
    choices: Sequence[str]
    regex: str
    grammar: str
    tools: Tools | Sequence[Mapping[str, Any]]
    schema_in_prompt: bool
    fill: bool


class OptionKeywords(GuideKeywords, total=False):
    """The fields of `Options`, `Sampling` and `Guide` as keywords of a chat's turn."""

    max_new_tokens: int
    min_new_tokens: int
    ignore_eos: bool
    sampling: Sampling
    gate_threshold: float
    stop: str | tuple[str, ...] | list[str]
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int | None
    prompt_lookup: int
    about: str | None
    timeout: float | None
    guide: Guide | None
    priority: int
    rest: str | float | None
    accept: str | float | None
    boxes: bool
    thinking: bool | None
    max_thinking_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    repetition_penalty: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]


class QuestionKeywords(OptionKeywords, total=False):
    """The keywords of a question: a turn's keywords, and the reductions."""

    reduce: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one answer: K, limits and sampling, reductions; the bundle's defaults if left out."""

    k: K = DEFAULT
    options: Options = dataclasses.field(default_factory=Options)
    reduce: str | None = DEFAULT

    @classmethod
    def of(cls, k: K, options: Options | None, keywords: Mapping[str, Any]) -> Settings:
        """The settings that the arguments of a question give.

        Raises RequestError: a keyword that names no option, or a wrong value.
        """
        changes = dict(keywords)
        reduce = changes.pop("reduce", DEFAULT)
        return cls(k, combined(options, changes), reduce)


_OPTIONS = frozenset(field.name for field in dataclasses.fields(Options))
_SAMPLING = frozenset(field.name for field in dataclasses.fields(Sampling))
_GUIDE = frozenset(GuideKeywords.__annotations__)
_KNOWN = _OPTIONS | _SAMPLING | _GUIDE
_DEFAULTS = Options()


def combined(options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """`options`, or the defaults, with the fields that keywords name replaced.

    Raises RequestError: a keyword that names no option, or a wrong value.
    """
    base = _DEFAULTS if options is None else options
    if not isinstance(base, Options):
        raise RequestError(f"options is {base!r:.40}; it must be a vtx.Options, or write keywords: max_new_tokens=64")
    changes: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    guide: dict[str, Any] = {}
    for name, value in sorted(keywords.items()):
        if name not in _KNOWN:
            from difflib import get_close_matches

            near = get_close_matches(name, sorted(_KNOWN), 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise RequestError(f"there is no option {name!r:.40}; {meant}help(vtx.Options) and vtx.Sampling list them")
        (changes if name in _OPTIONS else sampling if name in _SAMPLING else guide)[name] = value
    if guide:
        from vtx.runtime.prompt.guiding import Guide

        changes["guide"] = Guide(**guide)
    if sampling and isinstance(changes.get("sampling", base.sampling), Sampling):
        changes["sampling"] = dataclasses.replace(changes.get("sampling", base.sampling), **sampling)
    return dataclasses.replace(base, **changes) if changes else base
