"""From one question to its answer: prompt, prefill, tokens, text, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.accepting import doubt, threshold_of
from vtx.runtime.api.answer import Answer, Imposed, Progress, PromptLogprob, Stats
from vtx.runtime.api.boxes import Box, read_boxes
from vtx.runtime.api.loaded import LoadedBundle
from vtx.runtime.api.question import AnswerCosts, AnswerRecord, Question
from vtx.runtime.api.turns import Ended, Request
from vtx.runtime.api.writing import AnswerWriter
from vtx.runtime.backends.memory import QUESTION_ROWS
from vtx.runtime.errors import ContextError
from vtx.runtime.policies import PromptText, to_spec
from vtx.runtime.prompt.messages import asking_about
from vtx.runtime.prompt.tools import ToolCall
from vtx.runtime.session.encoded_images import EncodedImages, PreparedImage, selecting_text
from vtx.runtime.session.generate import Decoding, generate
from vtx.runtime.session.sampling import Sampler, log_probability, log_softmax, most_likely
from vtx.runtime.session.session import PrefillResult, Prompt, Selection, Session

NOTHING = PrefillResult(np.zeros(0, np.float32), None, False, 0, 0, 0, (), ())  # of a prompt stopped before its end


class AnswerInProgress(Request):
    """One answer while it is made.

    `lease` gives the session and the encoded images of the conversation for as long as it is its turn; `completed` gets
    a complete answer and the question that selected its image tokens.
    """

    def __init__(
        self,
        loaded: LoadedBundle,
        question: Question,
        lease: Callable[[Request], AbstractContextManager[tuple[Session, EncodedImages]]],
        completed: Callable[[Answer, Selection | None], None] | None = None,
    ) -> None:
        options = question.options
        super().__init__(options.timeout, options.priority)
        self._loaded = loaded
        self._question = question
        self._lease = lease
        self._completed = completed
        self._threshold = None if options.accept is None else threshold_of(options.accept, loaded.card)
        self._writer = AnswerWriter(loaded, question)
        self._record = AnswerRecord()
        self._costs = AnswerCosts(len(question.ids))
        self._images: tuple[PreparedImage, ...] = ()
        self.answer: Answer | None = None
        self.session: Session | None = None  # while it decodes, or the end of its prompt waits
        self.joins_prompts = False  # that end waits once for a pass with others'

    @property
    def thought(self) -> str:
        """The text of the thought so far."""
        return self._writer.thought or ""

    def pieces(self) -> Generator[str]:
        """Compute the answer, giving after each token the text that is certain, maybe none; the first with the prompt.

        If the end of the prompt waits, or choices are scored, there are steps before the first token.
        """
        question = self._question
        self._costs = AnswerCosts(len(question.ids))
        self.start()
        scored = question.options.prompt_logprobs is not None
        try:
            with self._lease(self) as (session, images):
                prompt = self._begin(session, images)
                if self.joins_prompts and 0 < len(session.waiting) <= QUESTION_ROWS:
                    self.session = session
                    yield ""
                result = session.finish(check=self.check)
                self._costs.prefill(result)
                self.session = session
                if scored:
                    yield from self._score_prompt(prompt, session)
                if question.scored_choices:
                    yield ""  # other answers continue before the first pass
                    yield from self._score(session, result)
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

    def _begin(self, session: Session, images: EncodedImages) -> Prompt:
        """Encode the images, and run the prompt but for the end that waits."""
        question = self._question
        policy = question.policy
        loaded = self._loaded
        before = images.seconds
        self._images = images.images
        try:
            text = self._selecting_text() if policy.uses_question else None
            expand = partial(loaded.text.asked, question.messages)
            token = loaded.manifest.text.image_token_id
            prompt = images.prompt(question.ids, token, policy, text, expand, self.check)
            self._costs.prompt_tokens = len(prompt.ids)
            scored = question.options.prompt_logprobs is not None
            session.begin(prompt, policy, after=question.after, check=self.check, scored=scored)
        finally:
            self._costs.vision = images.seconds - before
        return prompt

    def _selecting_text(self) -> PromptText | None:
        """The text by which image tokens are chosen: the question, or what `about` says."""
        loaded = self._loaded
        question = self._question
        messages = question.messages
        ids = question.ids
        after = question.after
        if question.options.about is not None:
            messages = asking_about(messages, question.options.about)
            after = None
            try:
                ids = loaded.prompts.ids(messages)
            except ContextError as e:
                raise ContextError(f"with about in place of the question, {e}", e.tokens, e.most) from e
        embeddings = partial(loaded.prompts.embed_question, messages)
        token = loaded.manifest.text.image_token_id
        return selecting_text(loaded.backend, ids, token, question.policy, after, embeddings)

    def progress(self, start: int) -> Progress:
        """The tokens so far, from number `start` on."""
        return self._record.progress(start)

    def end(self, stopped: str) -> None:
        """Complete the answer with what there is so far."""
        if self.answer is not None:
            return
        options = self._question.options
        record = self._record
        writer = self._writer
        text = writer.output.text
        unsure = None
        if self._threshold is not None:
            unsure = doubt(text, record.choices or {}, record.choices_mass or 0.0, self._threshold)
        self.answer = Answer(
            text,
            tuple(record.ids),
            self._stats(),
            stopped,
            tuple(record.logprobs) if options.logprobs else None,
            tuple(record.likely) if options.top_logprobs else None,
            record.choices,
            record.choices_mass,
            self._calls(text),
            unsure,
            judged=self._threshold is not None,
            boxes=self._boxes(text),
            thought=writer.thought,
            thought_tokens=writer.thought_tokens,
            prompt_logprobs=None if record.prompt_logprobs is None else tuple(record.prompt_logprobs),
        )

    def _calls(self, text: str) -> tuple[ToolCall, ...] | None:
        """The whole calls of tools in a text; None if there are no tools."""
        guide = self._question.options.guide
        if guide is None or guide.tools is None:
            return None
        calls = self._loaded.text.call_form.split(text, complete=True)[1]
        return tuple(call for call in calls if call.is_complete)

    def _stats(self) -> Stats:
        """The figures of the answer."""
        loaded = self._loaded
        manifest = loaded.manifest
        backend = loaded.backend
        policy = self._question.policy
        costs = self._costs
        record = self._record
        result = costs.prompt or NOTHING
        lookup = self._writer.lookup
        guided = self._writer.guided
        report = None
        if costs.prompt and (policy.reductions or result.rest):
            from vtx.runtime.session.reduction_report import reduced

            report = reduced(policy, result)
        seconds = {"load": loaded.load_ms / 1000, **costs.seconds(len(record.ids))}
        return Stats(
            k=result.k,
            full_layers=result.k - 1 if result.k else manifest.model.layers,
            exit_layer=result.k - 1 if result.k else None,
            prompt_tokens=costs.prompt_tokens,
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
            timings_ms={name: round(1000 * value, 3) for name, value in seconds.items()},
            gate=None if policy.decisions is None else tuple(policy.decisions),
            reduce=to_spec(policy.reductions) if policy.reductions else "none",
            reduced=report,
            drafted=lookup.drafted if lookup else None,
            accepted=lookup.accepted if lookup else None,
            forced=guided.forced if guided else None,
            imposed=Imposed.of(record.imposed) if guided else None,
            rest=result.rest,
            seg_states=None if manifest.text.seg_token_id is None else tuple(record.seg_states),
        )

    def _boxes(self, text: str) -> tuple[Box, ...] | None:
        """The boxes in the text of the answer, if they were asked for."""
        form = self._loaded.manifest.text.boxes
        if not self._question.options.boxes or form is None:
            return None
        return read_boxes(text, form, self._images[0]) if self._images else ()

    def _score_prompt(self, prompt: Prompt, session: Session) -> Generator[str]:
        """Find the log probability of each token of a prompt behind its last image, some of them in a pass."""
        count = self._question.options.prompt_logprobs
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
        self._record.prompt_logprobs = found

    def _score(self, session: Session, result: PrefillResult) -> Generator[str]:
        """Find the probability that the answer is a choice, up to its end token, for each; one pass a choice."""
        choices = self._question.scored_choices
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
        self._record.choices_mass = min(1.0, float(odds.sum() * np.exp(max(scores))))
        self._record.choices = dict(zip(choices, (odds / odds.sum()).tolist(), strict=True))

    @property
    def _reads_logits(self) -> bool:
        """True if a token is more than the one of the largest logit."""
        options = self._question.options
        told = options.logprobs or options.top_logprobs or self._loaded.manifest.text.seg_token_id is not None
        limited = options.min_new_tokens or self._writer.limit is not None
        return bool(told or limited) or self._writer.guided is not None

    def _allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [vocab] of the next token, -inf for tokens that may not come."""
        form = self._writer.form
        allowed = logits if form is None else form.mask(logits)
        if len(self._record.ids) < self._question.options.min_new_tokens:
            allowed = allowed.copy()
            allowed[list(self._loaded.manifest.text.end_ids)] = -np.inf
        return allowed

    def _note(self, token: int, logits: NDArray[np.float32], session: Session) -> None:
        """Keep what the answer says of a token beside its text."""
        options = self._question.options
        record = self._record
        form = self._writer.form
        if token == self._loaded.manifest.text.seg_token_id:
            record.seg_states.append(tuple(self._loaded.normed(session.state).tolist()))
        if form is not None and form.imposes:
            record.imposed.append(log_probability(logits, token))
        if options.logprobs:
            record.logprobs.append(log_probability(logits, token))
        if options.top_logprobs:
            record.likely.append(most_likely(logits, options.top_logprobs))

    def _generate(self, session: Session, result: PrefillResult, prompt: Prompt) -> Generator[str, None, str]:
        """Yield the text of token after token; return why it ended."""
        options = self._question.options
        writer = self._writer
        output = writer.output
        limit = writer.limit
        ids = self._record.ids
        end_ids = () if options.ignore_eos else self._loaded.manifest.text.end_ids
        sampler = Sampler(options.sampling, prompt.ids.tolist())

        def sample(logits: NDArray[np.float32]) -> int:
            token = None if limit is None else limit.next_token(len(ids))
            if token is None:
                token = sampler(self._allowed(logits))
            self._note(token, logits, session)
            return token

        tokens = generate(
            session,
            result.logits,
            sample,
            end_ids=end_ids,
            max_new_tokens=options.max_new_tokens,
            decoding=Decoding(
                self.check,
                writer.drafts(prompt, options.prompt_lookup),
                greedy=sampler.greedy and not self._reads_logits,
            ),
        )
        for token in tokens:
            self._costs.decode()
            ids.append(token)
            piece = writer.push(token, len(ids))
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
        if ids[-1] in end_ids or (writer.guided is not None and writer.guided.complete):
            return "end"
        return "length" if len(ids) == options.max_new_tokens else "context"
