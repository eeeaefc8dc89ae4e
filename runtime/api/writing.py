"""The text of an answer as its tokens come: its thought, its form, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.question import Question
from vtx.runtime.errors import RequestError
from vtx.runtime.prompt.messages import thinking_of
from vtx.runtime.prompt.thoughts import ThoughtDivider, ThoughtLimit, undecided
from vtx.runtime.prompt.tokenizer import Detokenizer
from vtx.runtime.session.generate import Drafts
from vtx.runtime.session.session import Prompt

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import GuidedAnswer
    from vtx.runtime.prompt.lookup import PromptLookup


class TextOutput:
    """Tokens in, pieces of `text` out: no leading space, nothing of a stop string.

    A piece that may begin a stop string waits until that is known. The answer ends at the first character with which a
    stop string is complete, and is cut where that string begins; token boundaries play no part.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        begun: Sequence[int] = (),
        divider: ThoughtDivider | None = None,
        least: int = 0,
    ) -> None:
        """`begun`: tokens that the answer continues; its text then keeps a leading space.

        `divider`: takes a thought out of the text; the detokenizer then has the texts of its marks. A stop string that
        is complete with one of the first `least` tokens is text.
        """
        self._divider = divider
        for token in begun:
            detokenizer.push(token)
        self._continues = bool(begun)
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._least = least
        self._waiting = ""
        self.text = ""  # the pieces so far
        self.stopped = False

    def push(self, token: int | None) -> str:
        """The text that is certain with one more token, maybe none; None: the rest."""
        piece = self._detokenizer.finish() if token is None else self._detokenizer.push(token)
        if self._divider is not None:
            piece = self._divider.push(piece, last=token is None)
            if not (self._divider.inside or self._divider.may_begin):
                self._detokenizer.marks = {}
        text = self._waiting + piece
        text = text if self.text or self._continues else text.lstrip()
        self._least -= token is not None
        stops = () if self._least >= 0 else self._stops
        ends = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
        cut = len(text)
        if ends:
            self.stopped, cut = True, min(ends)[1]
        elif token is not None:
            cut -= undecided(text, self._stops)
        self._waiting = "" if self.stopped else text[cut:]
        self.text += text[:cut]
        return text[:cut]


class AnswerWriter:
    """Tokens in, text out: a thought and the `output` behind it, in the form that is asked for (`guided`).

    `thought_tokens`: tokens of the thought, its end mark included. `lookup`: drafts from the prompt, if they are used.
    """

    def __init__(self, loaded: LoadedBundle, question: Question) -> None:
        """Raises RequestError for a form that cannot begin behind the thought, or cannot be compiled."""
        text = loaded.text
        options = question.options
        self.guided: GuidedAnswer | None = None if options.guide is None else loaded.prompts.guided(options.guide)
        self.lookup: PromptLookup | None = None
        self.thought_tokens = 0
        self._thoughts = text.thoughts(question.messages, question.ids)
        self.limit: ThoughtLimit | None = None
        if self._thoughts is not None and options.max_thinking_tokens is not None:
            self.limit = text.thought_limit(self._thoughts, options.max_thinking_tokens)
        detokenizer = text.stream(marks=self._thoughts is not None)
        begun = text.begun(question.messages)
        self.output = TextOutput(detokenizer, options.stop, begun, self._thoughts, options.min_new_tokens)
        self._check_form(question)

    def _check_form(self, question: Question) -> None:
        guide = question.options.guide
        if guide is None or self._thoughts is None:
            return
        if self._thoughts.inside and question.scored_choices:
            raise RequestError(
                "choices are scored right behind the prompt, where a thought begins; leave choices or thoughts out"
            )
        if thinking_of(question.messages) and not self._thoughts.inside:
            raise RequestError(
                f"this model begins its thoughts itself, and {guide.kind} would leave none; leave thinking out"
            )

    @property
    def thought(self) -> str | None:
        """The text of the thought so far; None without one."""
        return None if self._thoughts is None else self._thoughts.thought

    @property
    def form(self) -> GuidedAnswer | None:
        """The form of the next token; None in a thought."""
        thinks = self._thoughts is not None and self._thoughts.inside
        return None if thinks else self.guided

    def drafts(self, prompt: Prompt, most: int) -> Drafts | None:
        """The drafts of the answer's form, else those of up to `most` tokens looked up in the prompt, if any."""
        if most:
            from vtx.runtime.prompt.lookup import PromptLookup

            self.lookup = PromptLookup(prompt.ids[~prompt.is_vision].tolist(), most)
        if self.guided is None:
            return self.lookup
        self.guided.lookup = self.lookup
        return self.guided if self._thoughts is None else self.guided.behind(self._thoughts)

    def push(self, token: int, number: int) -> str:
        """The text that token `number` of the answer, from 1, makes certain."""
        thoughts = self._thoughts
        inside = thoughts is not None and thoughts.inside
        piece = self.output.push(token)
        if inside or (thoughts is not None and thoughts.inside):
            self.thought_tokens = number
        return piece
