"""From one question to its answer: prompt, prefill, tokens, text, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.answer import Answer, Progress, Stats
from vtx.runtime.api.options import Options
from vtx.runtime.api.text_output import TextOutput
from vtx.runtime.api.turns import Ended, Request
from vtx.runtime.policies import to_spec
from vtx.runtime.policies.make import decisions
from vtx.runtime.policies.policy import Policy
from vtx.runtime.prompt.lookup import PromptLookup
from vtx.runtime.prompt.messages import Message
from vtx.runtime.session.assemble import make_prompt, selecting_text
from vtx.runtime.session.clock import Clock
from vtx.runtime.session.encoded_images import EncodedImages
from vtx.runtime.session.generate import generate
from vtx.runtime.session.reduction_report import reduced
from vtx.runtime.session.result import PrefillResult, Selection
from vtx.runtime.session.sampling import Likely, Sampler, log_probability, most_likely
from vtx.runtime.session.session import Prompt, Session

if TYPE_CHECKING:
    from vtx.runtime.api.model import Model


@dataclass(frozen=True, slots=True)
class Caches:
    """What a conversation keeps between questions."""

    session: Session
    images: EncodedImages


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, checked and in token ids. `after`: the question of a chat's first turn."""

    messages: Sequence[Message]
    ids: NDArray[np.int64]
    policy: Policy
    options: Options
    after: Selection | None = None


class AnswerInProgress:
    """One answer while it is made.

    `lease` gives the caches of the conversation for as long as it is its turn; `completed` gets a complete answer and
    the question that selected its image tokens.
    """

    def __init__(
        self,
        model: Model,
        question: Question,
        lease: Callable[[Request], AbstractContextManager[Caches]],
        completed: Callable[[Answer, Selection | None], None],
    ) -> None:
        self._model, self._question, self._lease, self._completed = model, question, lease, completed
        self.request = Request(question.options.timeout)
        self.answer: Answer | None = None
        self._clock = Clock()
        self._prompt_tokens = len(question.ids)
        self._result: PrefillResult | None = None
        self.session: Session | None = None  # while it decodes
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._likely: list[Likely] = []
        self._seg_states: list[tuple[float, ...]] = []
        self._lookup: PromptLookup | None = None
        self._output = TextOutput(model.text.stream(), question.options.stop)

    def pieces(self) -> Generator[str]:
        """Compute the answer, giving after the prompt and after each token the text that is certain, maybe none."""
        self._clock = Clock()
        self.request.start()
        try:
            with self._lease(self.request) as caches:
                prompt = self._prompt(caches.images)
                question, check = self._question, self.request.check
                self._result = caches.session.prefill(prompt, question.policy, after=question.after, check=check)
                self._clock.prefilled()
                self.session = caches.session
                yield ""
                stopped = yield from self._generate(caches.session, self._result, prompt)
                self.end(stopped)
                assert self.answer is not None
                self._completed(self.answer, self._result.selection)
        except Ended as e:
            self.end(e.stopped)
        except GeneratorExit:
            self.end("cancelled")
            raise
        finally:
            self.session = None

    def progress(self, start: int) -> Progress:
        """The tokens so far from number `start` on."""
        return Progress(tuple(self._ids[start:]), tuple(self._logprobs[start:]), tuple(self._likely[start:]))

    def end(self, stopped: str) -> None:
        """Set the answer to what there is."""
        if self.answer is None:
            options = self._question.options
            logprobs = tuple(self._logprobs) if options.logprobs else None
            likely = tuple(self._likely) if options.top_logprobs else None
            self.answer = Answer(self._output.text, tuple(self._ids), self._stats(), stopped, logprobs, likely)

    def _prompt(self, images: EncodedImages) -> Prompt:
        question, model, check = self._question, self._model, self.request.check
        token, policy = model.manifest.text.image_token_id, question.policy
        embeddings = partial(model.embed_question, question.messages)
        text = selecting_text(model.backend, question.ids, token, policy, question.after, embeddings)
        encoders = self._clock.all_vision(images.encoders(policy.entries, text, check))
        expand = partial(model.text.prompt, question.messages)
        prompt = make_prompt(question.ids, token, encoders, policy, expand, check)
        self._prompt_tokens = len(prompt.ids)
        return prompt

    def _generate(self, session: Session, result: PrefillResult, prompt: Prompt) -> Generator[str, None, str]:
        """Give the text of token after token; returns why it ended."""
        options, output, ids = self._question.options, self._output, self._ids
        end_ids = () if options.ignore_eos else self._model.manifest.text.end_ids
        sampler = Sampler(options.sampling, prompt.ids.tolist())

        def sample(logits: NDArray[np.float32]) -> int:
            token = sampler(logits)
            if token == self._model.manifest.text.seg_token_id:
                self._seg_states.append(tuple(self._model.normed(session.state).tolist()))
            if options.logprobs:
                self._logprobs.append(log_probability(logits, token))
            if options.top_logprobs:
                self._likely.append(most_likely(logits, options.top_logprobs))
            return token

        if options.prompt_lookup:
            self._lookup = PromptLookup(prompt.ids[~prompt.is_vision].tolist(), options.prompt_lookup)
        limit, check = options.max_new_tokens, self.request.check
        tokens = generate(
            session, result.logits, sample, end_ids=end_ids, max_new_tokens=limit, check=check, lookup=self._lookup
        )
        for token in tokens:
            self._clock.token()
            ids.append(token)
            piece = output.push(token)
            if output.stopped:
                session.next_token = None
            yield piece
            if output.stopped:
                return "stop"
        rest = output.finish()
        if rest:
            yield rest
        if output.stopped:
            return "stop"
        return "end" if ids[-1] in end_ids else "length" if len(ids) == limit else "context"

    def _stats(self) -> Stats:
        manifest, backend, policy = self._model.manifest, self._model.backend, self._question.policy
        result, gate = self._result, decisions(policy)
        k = result.k if result else None
        slots = result.slots if result else ()
        return Stats(
            k=k,
            full_layers=k - 1 if k else manifest.model.layers,
            exit_layer=k - 1 if k else None,
            prompt_tokens=self._prompt_tokens,
            vision_tokens=result.vision_tokens if result else 0,
            vision_tokens_kept=result.vision_kept if result else (),
            kv_slots=slots,
            kv_bytes=sum(slots) * backend.kv_slot_bytes,
            reused_image=result.reused_image if result else False,
            reused_layers=result.reused_layers if result else 0,
            reused_tokens=result.reused_tokens if result else 0,
            device=backend.device,
            compute=backend.compute,
            precision=manifest.precision,
            timings_ms={"load": round(self._model.load_ms, 3), **self._clock.timings()},
            gate=None if gate is None else tuple(gate),
            reduce=to_spec(policy.reductions),
            reduced=reduced(policy, result) if result else None,
            drafted=self._lookup.drafted if self._lookup else None,
            accepted=self._lookup.accepted if self._lookup else None,
            seg_states=None if manifest.text.seg_token_id is None else tuple(self._seg_states),
        )
