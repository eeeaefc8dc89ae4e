"""From one question to its answer: prompt, prefill, tokens, text, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.accepting import MAX_SCORED, doubt, threshold_of
from vtx.runtime.api.answer import Answer, Imposed, Progress, PromptLogprob, Stats
from vtx.runtime.api.boxes import Box, read_boxes
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.options import Options
from vtx.runtime.api.turns import Ended, Request
from vtx.runtime.backends.memory import QUESTION_ROWS
from vtx.runtime.errors import ContextError, RequestError
from vtx.runtime.policies import PromptText, to_spec
from vtx.runtime.policies.base import Policy
from vtx.runtime.prompt.messages import Message, asking_about, thinking_of
from vtx.runtime.prompt.thoughts import ThoughtDivider, ThoughtLimit, undecided
from vtx.runtime.prompt.tokenizer import Detokenizer
from vtx.runtime.prompt.tools import ToolCall
from vtx.runtime.session.encoded_images import EncodedImages, PreparedImage, selecting_text
from vtx.runtime.session.generate import Drafts, generate
from vtx.runtime.session.sampling import Likely, Sampler, log_probability, log_softmax, most_likely
from vtx.runtime.session.session import PrefillResult, Prompt, Selection, Session

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import GuidedAnswer
    from vtx.runtime.prompt.lookup import PromptLookup

NOTHING = PrefillResult(np.zeros(0, np.float32), None, False, 0, 0, 0, (), ())  # of a prompt stopped before its end


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


class AnswerInProgress(Request):
    """One answer while it is made, to messages that were checked and are in token `ids`.

    `after` is the question of a chat's first turn. `lease` gives the session and the encoded images of the
    conversation for as long as it is its turn; `completed` gets a complete answer and the question that selected its
    image tokens.
    """

    def __init__(
        self,
        loaded: LoadedBundle,
        messages: Sequence[Message],
        ids: NDArray[np.int64],
        policy: Policy,
        options: Options,
        lease: Callable[[Request], AbstractContextManager[tuple[Session, EncodedImages]]],
        *,
        after: Selection | None = None,
        completed: Callable[[Answer, Selection | None], None] | None = None,
    ) -> None:
        super().__init__(options.timeout, options.priority)
        self._loaded = loaded
        self._messages = messages
        self._prompt_ids = ids
        self._policy = policy
        self._options = options
        self._lease = lease
        self._after = after
        self._completed = completed
        self.answer: Answer | None = None
        self._start = self._prefilled = self._first_token = self._last_token = perf_counter()
        self._vision_seconds = 0.0
        self._prompt_tokens = len(ids)
        self._result: PrefillResult | None = None
        self.session: Session | None = None  # while it decodes, or the end of its prompt waits
        self.joins_prompts = False  # that end waits once for a pass with others'
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._likely: list[Likely] = []
        self._prompt_logprobs: list[PromptLogprob | None] | None = None
        self._imposed: list[float] = []  # log probabilities of the tokens that a form imposed
        self._seg_states: list[tuple[float, ...]] = []
        self._lookup: PromptLookup | None = None
        self._images: tuple[PreparedImage, ...] = ()
        self._choices: dict[str, float] | None = None
        self._choices_mass: float | None = None
        accept = options.accept
        self._threshold = None if accept is None else threshold_of(accept, loaded.card)
        self._guided = None if options.guide is None else loaded.guided(options.guide)
        self._thoughts = loaded.text.thoughts(messages, ids)
        self._thought_tokens = 0
        detokenizer = loaded.text.stream(marks=self._thoughts is not None)
        begun = loaded.text.begun(messages)
        self._output = TextOutput(detokenizer, options.stop, begun, self._thoughts, options.min_new_tokens)
        self._check_form()

    def _check_form(self) -> None:
        """Raise RequestError for a form that cannot begin behind the thought."""
        guide = self._options.guide
        if guide is None or self._thoughts is None:
            return
        if self._thoughts.inside and guide.choices is not None and len(guide.choices) <= MAX_SCORED:
            raise RequestError(
                "choices are scored right behind the prompt, where a thought begins; leave choices or thoughts out"
            )
        if thinking_of(self._messages) and not self._thoughts.inside:
            raise RequestError(
                f"this model begins its thoughts itself, and {guide.kind} would leave none; leave thinking out"
            )

    @property
    def thought(self) -> str:
        """The text of the thought so far."""
        return "" if self._thoughts is None else self._thoughts.thought or ""

    def pieces(self) -> Generator[str]:
        """Compute the answer, giving after each token the text that is certain, maybe none; the first with the prompt.

        If the end of the prompt waits, or choices are scored, there are steps before the first token.
        """
        self._start = self._prefilled = self._first_token = self._last_token = perf_counter()
        self.start()
        loaded = self._loaded
        policy = self._policy
        token = self._loaded.manifest.text.image_token_id
        try:
            with self._lease(self) as (session, images):
                before = images.seconds
                self._images = images.images
                try:
                    text = self._selecting_text() if policy.uses_question else None
                    expand = partial(loaded.text.asked, self._messages)
                    prompt = images.prompt(self._prompt_ids, token, policy, text, expand, self.check)
                    self._prompt_tokens = len(prompt.ids)
                    scored = self._options.prompt_logprobs is not None
                    session.begin(prompt, policy, after=self._after, check=self.check, scored=scored)
                finally:
                    self._vision_seconds = images.seconds - before
                waits = self.joins_prompts and 0 < len(session.waiting) <= QUESTION_ROWS
                if waits:
                    self.session = session
                    yield ""
                result = session.finish(check=self.check)
                self._result, self._prefilled = result, perf_counter()
                self.session = session
                if scored:
                    yield from self._score_prompt(prompt, session)
                choices = self._options.guide.choices if self._options.guide is not None else None
                if choices is not None and len(choices) <= MAX_SCORED:
                    yield ""  # other answers continue before the first pass
                    yield from self._score(choices, session, result)
                stopped = yield from self._generate(session, result, prompt)
                self.end(stopped)
                if self._completed is not None and self.answer is not None:
                    self._completed(self.answer, result.selection)
        except Ended as e:
            self.end(e.stopped)
        except GeneratorExit:
            self.end("cancelled")
            raise
        finally:
            self.session = None

    def _selecting_text(self) -> PromptText | None:
        """The text by which image tokens are chosen: the question, or what `about` says."""
        loaded = self._loaded
        messages = self._messages
        ids = self._prompt_ids
        after = self._after
        if self._options.about is not None:
            messages = asking_about(messages, self._options.about)
            after = None
            try:
                ids = loaded.prompt_ids(messages)
            except ContextError as e:
                raise ContextError(f"with about in place of the question, {e}", e.tokens, e.most) from e
        embeddings = partial(loaded.embed_question, messages)
        token = loaded.manifest.text.image_token_id
        return selecting_text(loaded.backend, ids, token, self._policy, after, embeddings)

    def progress(self, start: int) -> Progress:
        """The tokens so far, from number `start` on."""
        return Progress(tuple(self._ids[start:]), tuple(self._logprobs[start:]), tuple(self._likely[start:]))

    def end(self, stopped: str) -> None:
        """Complete the answer with what there is so far."""
        if self.answer is not None:
            return
        options = self._options
        text = self._output.text
        unsure = None
        if self._threshold is not None:
            unsure = doubt(text, self._choices or {}, self._choices_mass or 0.0, self._threshold)
        self.answer = Answer(
            text,
            tuple(self._ids),
            self._stats(self._result or NOTHING),
            stopped,
            tuple(self._logprobs) if options.logprobs else None,
            tuple(self._likely) if options.top_logprobs else None,
            self._choices,
            self._choices_mass,
            self._calls(text),
            unsure,
            judged=self._threshold is not None,
            boxes=self._boxes(text),
            thought=None if self._thoughts is None else self._thoughts.thought,
            thought_tokens=self._thought_tokens,
            prompt_logprobs=None if self._prompt_logprobs is None else tuple(self._prompt_logprobs),
        )

    def _calls(self, text: str) -> tuple[ToolCall, ...] | None:
        """The whole calls of tools in a text; None if there are no tools."""
        guide = self._options.guide
        if guide is None or guide.tools is None:
            return None
        calls = self._loaded.text.call_form.split(text, complete=True)[1]
        return tuple(call for call in calls if call.is_complete)

    def _seconds(self) -> dict[str, float]:
        """The seconds that each part took."""
        decoding = self._last_token - self._first_token
        return {
            "load": self._loaded.load_ms / 1000,
            "vision": self._vision_seconds,
            "prefill": max(0.0, self._prefilled - self._start - self._vision_seconds),
            "first_token": self._first_token - self._start,
            "decode_per_token": decoding / (len(self._ids) - 1) if len(self._ids) > 1 else 0.0,
        }

    def _stats(self, result: PrefillResult) -> Stats:
        """The figures of the answer."""
        manifest = self._loaded.manifest
        backend = self._loaded.backend
        policy = self._policy
        report = None
        if self._result and (policy.reductions or result.rest):
            from vtx.runtime.session.reduction_report import reduced

            report = reduced(policy, result)
        return Stats(
            k=result.k,
            full_layers=result.k - 1 if result.k else manifest.model.layers,
            exit_layer=result.k - 1 if result.k else None,
            prompt_tokens=self._prompt_tokens,
            vision_tokens=result.vision_tokens,
            vision_tokens_kept=result.vision_kept,
            kv_slots=result.slots,
            kv_bytes=sum(result.slots) * backend.kv_slot_bytes,
            reused_image=result.reused_image,
            reused_layers=result.reused_layers,
            reused_tokens=result.reused_tokens,
            not_reused=result.not_reused,
            device=backend.device,
            compute=backend.compute,
            precision=manifest.precision,
            timings_ms={name: round(1000 * value, 3) for name, value in self._seconds().items()},
            gate=None if policy.decisions is None else tuple(policy.decisions),
            reduce=to_spec(policy.reductions) if policy.reductions else "none",
            reduced=report,
            drafted=self._lookup.drafted if self._lookup else None,
            accepted=self._lookup.accepted if self._lookup else None,
            forced=self._guided.forced if self._guided else None,
            imposed=Imposed.of(self._imposed) if self._guided else None,
            rest=result.rest,
            seg_states=None if manifest.text.seg_token_id is None else tuple(self._seg_states),
        )

    def _boxes(self, text: str) -> tuple[Box, ...] | None:
        """The boxes in the text of the answer, if they were asked for."""
        form = self._loaded.manifest.text.boxes
        if not self._options.boxes or form is None:
            return None
        return read_boxes(text, form, self._images[0]) if self._images else ()

    def _score_prompt(self, prompt: Prompt, session: Session) -> Generator[str]:
        """Find the log probability of each token of a prompt behind its last image, some of them in a pass."""
        count = self._options.prompt_logprobs
        suffix = prompt.ids[prompt.prefix_length :].tolist()
        found: list[PromptLogprob | None] = [None] * (prompt.prefix_length + 1)
        for first in range(0, len(suffix) - 1, QUESTION_ROWS):
            self.check()
            following = suffix[first + 1 : first + 1 + QUESTION_ROWS]
            all_logits = session.suffix_logits(first, first + len(following))
            for token, logits, known in zip(following, all_logits, log_softmax(all_logits), strict=True):
                value = float(known[token])
                likely = most_likely(logits, count) if count else ()
                found.append(PromptLogprob(value, 1 + int((known > value).sum()), likely))
            yield ""  # other answers continue between two passes
        self._prompt_logprobs = found

    def _score(self, choices: Sequence[str], session: Session, result: PrefillResult) -> Generator[str]:
        """Find the probability that the answer is a choice, up to its end token, for each; one pass a choice."""
        text = self._loaded.text
        scores = list[float]()
        for choice in choices:
            self.check()
            ids = text.answer_ids(choice)
            logits = result.logits[None]
            logits = np.concatenate([logits, session.try_tokens(ids)]) if ids else logits
            known = log_softmax(logits)
            end = np.logaddexp.reduce(known[-1, list(text.settings.end_ids)])
            scores.append(float(known[np.arange(len(ids)), ids].sum() + end))
            yield ""  # other answers continue between two passes
        odds = np.exp(np.array(scores) - max(scores))
        self._choices_mass = min(1.0, float(odds.sum() * np.exp(max(scores))))
        self._choices = dict(zip(choices, (odds / odds.sum()).tolist(), strict=True))

    def _thought_limit(self) -> ThoughtLimit | None:
        """The limit of the thought's tokens; None without one."""
        most = self._options.max_thinking_tokens
        if self._thoughts is None or most is None:
            return None
        return self._loaded.text.thought_limit(self._thoughts, most)

    def _drafts(self, prompt: Prompt) -> Drafts | None:
        """The drafts of the answer's form, else those that are looked up in the prompt, if there are any."""
        options = self._options
        guided = self._guided
        thoughts = self._thoughts
        if options.prompt_lookup:
            from vtx.runtime.prompt.lookup import PromptLookup

            self._lookup = PromptLookup(prompt.ids[~prompt.is_vision].tolist(), options.prompt_lookup)
        drafts: Drafts | None = self._lookup
        if guided is not None:
            guided.lookup = self._lookup
            drafts = guided if thoughts is None else guided.behind(thoughts)
        return drafts

    @property
    def _reads_logits(self) -> bool:
        """True if a token is more than the one of the largest logit."""
        options = self._options
        told = options.logprobs or options.top_logprobs or self._loaded.manifest.text.seg_token_id is not None
        return bool(told or options.min_new_tokens) or self._guided is not None

    @property
    def _form(self) -> GuidedAnswer | None:
        """The form of the next token; None in a thought."""
        thinks = self._thoughts is not None and self._thoughts.inside
        return None if thinks else self._guided

    def _allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [vocab] of the next token, -inf for tokens that may not come."""
        form = self._form
        allowed = logits if form is None else form.mask(logits)
        if len(self._ids) < self._options.min_new_tokens:
            allowed = allowed.copy()
            allowed[list(self._loaded.manifest.text.end_ids)] = -np.inf
        return allowed

    def _record(self, token: int, logits: NDArray[np.float32], session: Session) -> None:
        """Keep what the answer says of a token beside its text."""
        options = self._options
        form = self._form
        if token == self._loaded.manifest.text.seg_token_id:
            self._seg_states.append(tuple(self._loaded.normed(session.state).tolist()))
        if form is not None and form.imposes:
            self._imposed.append(log_probability(logits, token))
        if options.logprobs:
            self._logprobs.append(log_probability(logits, token))
        if options.top_logprobs:
            self._likely.append(most_likely(logits, options.top_logprobs))

    def _push(self, token: int) -> str:
        """The text that one more token makes certain; counts those of a thought, its end mark included."""
        thoughts = self._thoughts
        inside = thoughts is not None and thoughts.inside
        piece = self._output.push(token)
        if inside or (thoughts is not None and thoughts.inside):
            self._thought_tokens = len(self._ids)
        return piece

    def _generate(self, session: Session, result: PrefillResult, prompt: Prompt) -> Generator[str, None, str]:
        """Yield the text of token after token; return why it ended."""
        options = self._options
        output = self._output
        ids = self._ids
        guided = self._guided
        limit = self._thought_limit()
        end_ids = () if options.ignore_eos else self._loaded.manifest.text.end_ids
        sampler = Sampler(options.sampling, prompt.ids.tolist())

        def sample(logits: NDArray[np.float32]) -> int:
            token = None if limit is None else limit.next_token(len(ids))
            if token is None:
                token = sampler(self._allowed(logits))
            self._record(token, logits, session)
            return token

        tokens = generate(
            session,
            result.logits,
            sample,
            end_ids=end_ids,
            max_new_tokens=options.max_new_tokens,
            check=self.check,
            drafts=self._drafts(prompt),
            greedy=sampler.greedy and limit is None and not self._reads_logits,
        )
        for token in tokens:
            self._last_token = perf_counter()
            self._first_token = self._first_token if ids else self._last_token
            ids.append(token)
            piece = self._push(token)
            if output.stopped:
                session.next_token = None
            yield piece
            if output.stopped:
                return "stop"
        rest = output.push(None)
        if rest:
            yield rest
        if output.stopped:
            return "stop"
        ended = ids[-1] in end_ids or (guided is not None and guided.complete)
        return "end" if ended else "length" if len(ids) == options.max_new_tokens else "context"
