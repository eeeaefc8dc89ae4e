"""An answer: its text, its tokens and its cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vtx.runtime.prompt.tools import ToolCall
from vtx.runtime.session.sampling import Likely
from vtx.runtime.units import counted

if TYPE_CHECKING:
    from vtx.runtime.api.boxes import Box
    from vtx.runtime.policies.base import Decision
    from vtx.runtime.session.reduction_report import ReductionReport


class Progress(NamedTuple):
    """Tokens of an answer that is being made, with their log probabilities and the most likely ones if asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Likely, ...] = ()


class PromptLogprob(NamedTuple):
    """The log probability of a token of the prompt, its rank among all (1: the likeliest), and the most likely ones."""

    logprob: float
    rank: int
    likely: Likely


UNLIKELY = -5.0  # mean log probability of imposed tokens below which they are told of


@dataclass(frozen=True, slots=True)
class Imposed:
    """The part of a guided answer that its form imposed, and how probable the model itself found it.

    A token is imposed if the form left no other, or did not allow the model's most likely one. `mean_logprob` and
    `least_logprob` are the mean and the smallest natural logarithm of the probability that the model gave to imposed
    tokens before the form did; None without any. `unlikely`: the mean is below `UNLIKELY`.
    """

    tokens: int
    mean_logprob: float | None
    least_logprob: float | None
    unlikely: bool

    @classmethod
    def of(cls, logprobs: Sequence[float]) -> Imposed:
        """`logprobs`: those of the imposed tokens."""
        if not logprobs:
            return cls(0, None, None, unlikely=False)
        mean = math.fsum(logprobs) / len(logprobs)
        return cls(len(logprobs), mean, min(logprobs), unlikely=mean < UNLIKELY)

    @property
    def in_words(self) -> str:
        """One line about an `unlikely` part, for people."""
        return (
            f"the form imposed {counted(self.tokens, 'token')} that the model finds unlikely (log probability "
            f"{self.mean_logprob:.1f} on average, {self.least_logprob:.1f} at least; the limit is {UNLIKELY:g}), so "
            "its values may be wrong; use --fill or --schema-in-prompt"
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """The cost of an answer. Per-layer lists start with layer 1; times are milliseconds.

    `k` is the first layer without image tokens, but for the `rest` of them that stayed there, and None if all stayed;
    `exit_layer` is the layer before it, None likewise. `kv_slots` and `kv_bytes` count filled slots right after the
    prompt.
    `reused_layers`: in layers 1 to this one no image token was run, since an earlier question's caches hold them.
    `reused_tokens`: tokens of the prompt that they served; of another prompt, those before the first that differs.
    `not_reused`: why image tokens were run, in one word (docs/how-to/reduce.md); None if none were.
    `timings_ms.first_token` runs from the question to the first token, vision and prefill included.
    `device` computes in `compute` (f32, bf16, int8 or f16), with weights stored in `precision`.
    `gate` holds the decisions of the gates, in the order they were asked, if K was "auto"; else None.
    `drafted` tokens were looked up in the prompt and the answer, `accepted` of them were right; None without lookup.
    `forced` tokens of a guided answer were certain and ran in the pass of an earlier one; None without a guide.
    `imposed` says how probable the model found what its form made it write; None without a guide.
    `seg_states` holds, for each segmentation token of the answer, the hidden state [hidden] after the decoder's final
    norm that chose it, which a mask decoder reads; None if the model has no such token.
    `reduce` is the canonical spec of the reductions, and `reduced` their effect; "none" and None if there are none.
    If the prompt was stopped before its first token, per-layer lists are empty and counts 0.
    """

    k: int | None
    full_layers: int
    exit_layer: int | None
    prompt_tokens: int
    vision_tokens: int
    vision_tokens_kept: tuple[int, ...]
    kv_slots: tuple[int, ...]
    kv_bytes: int
    reused_image: bool
    reused_layers: int
    reused_tokens: int
    not_reused: str | None
    device: str
    compute: str
    precision: str
    timings_ms: dict[str, float]
    gate: tuple[Decision, ...] | None = None
    reduce: str = "none"
    reduced: ReductionReport | None = field(default=None, repr=False)
    drafted: int | None = None
    accepted: int | None = None
    forced: int | None = None
    seg_states: tuple[tuple[float, ...], ...] | None = field(default=None, repr=False)
    rest: int = 0
    imposed: Imposed | None = None

    def __str__(self) -> str:
        times = self.timings_ms
        rest = f" with a rest of {self.rest}" if self.rest else ""
        return (
            f"K {self.k or 'none'}{rest}, {self.prompt_tokens} prompt tokens ({self.vision_tokens} of images), "
            f"{self.kv_bytes:,} bytes of K/V, first token after {times.get('first_token', 0):.1f} ms, "
            f"{times.get('decode_per_token', 0):.2f} ms per token, on {self.device} in {self.compute}"
        )


@dataclass(frozen=True, slots=True)
class FieldValue:
    """The value of a field of a form that was filled in after an answer.

    `probability`: of a field with listed values the share of this one among them, and `mass` the probability that the
    model answers with one of them at all; of an open field the probability of its text, and None.
    """

    value: Any
    probability: float
    mass: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's text, its token ids (an end token included), its cost, and why it ended.

    `stopped` is "end" (an end token, or a guided answer that nothing may follow), "stop" (a stop string), "length"
    (`max_new_tokens`), "context" (no KV slot left), "timeout" or "cancelled"; only with "end" a guided answer is
    complete. `logprobs` are the natural
    logarithms of the tokens' probabilities as the model gives them, before sampling, and `top_logprobs` the most likely
    tokens at each position with theirs, (id, log probability); None if not asked for. `prompt_logprobs`: of each token
    of the prompt, None up to the first one behind its last image, of which nothing is known; None if not asked for.
    `choices`: the probability of each choice that was given, normalised over them, and `choices_mass` the probability
    that the model's answer is one of them at all; None without choices, or if there are more than `MAX_SCORED`.
    `tool_calls`: the complete calls in an answer with tools, whose text has them too.
    `unsure`: why the answer is not to be acted on, if `accept` was given (`judged`); None: it is accepted.
    `boxes` that the answer names, in pixels of the picture as it was given, if asked for; else None.
    `thought`: the thought before the answer, which is no part of `text`, and `thought_tokens` the number of its tokens
    with the end mark; None and 0 without one.
    `fields` of a form that was filled in (`fill`), by name, and the answer before it, `free_text`; else None.
    `str()` gives the text, `repr()` all but the cost, which `print(answer.stats)` prints on one line.
    """

    text: str
    token_ids: tuple[int, ...]
    stats: Stats = field(repr=False)
    stopped: str
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Likely, ...] | None = None
    choices: dict[str, float] | None = None
    choices_mass: float | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    unsure: str | None = None
    judged: bool = False
    fields: Mapping[str, FieldValue] | None = None
    free_text: str | None = None
    boxes: tuple[Box, ...] | None = None
    thought: str | None = None
    thought_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def incomplete(self) -> bool:
        """True for a guided answer that ended before its form was complete, such as JSON that `max_new_tokens` cut."""
        return self.stats.forced is not None and self.stopped != "end"

    @property
    def warnings(self) -> list[str]:
        """Lines for people: why it is unsure, and that its form imposed what the model finds unlikely."""
        lines = [] if self.unsure is None else [f"unsure: {self.unsure}"]
        imposed = self.stats.imposed
        return [*lines, f"warning: {imposed.in_words}"] if imposed is not None and imposed.unlikely else lines

    def to_dict(self) -> dict[str, Any]:
        """The object that `vtx-run --json` prints, without `question`, `image` and `bundle`."""
        facts: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, "stopped": self.stopped}
        facts |= dataclasses.asdict(self.stats)
        facts |= facts.pop("reduced") or {}
        for name in ("gate", "drafted", "accepted", "forced", "imposed", "seg_states"):
            if facts[name] is None:
                del facts[name]
        for name in ("logprobs", "top_logprobs", "prompt_logprobs", "choices", "thought"):
            if getattr(self, name) is not None:
                facts[name] = getattr(self, name)
        for name in ("boxes", "tool_calls"):
            if getattr(self, name) is not None:
                facts[name] = list(map(dataclasses.asdict, getattr(self, name)))
        if self.choices is not None:
            facts["choices_mass"] = self.choices_mass
        if self.judged:
            facts["unsure"] = self.unsure
        if self.fields is not None:
            facts["fields"] = {name: dataclasses.asdict(field) for name, field in self.fields.items()}
            facts["free_text"] = self.free_text
        if self.thought is not None:
            facts["thought_tokens"] = self.thought_tokens
        if self.incomplete:
            facts["incomplete"] = True
        return facts
