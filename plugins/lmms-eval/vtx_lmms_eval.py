"""vtx bundles as a model of lmms-eval: `lmms-eval --model vtx --model_args bundle=llava-7b,k=17 --tasks pope`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NoReturn

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from tqdm import tqdm

import vtx
from vtx.runtime.api.options import Settings
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine

MANIFEST = ModelManifest(model_id="vtx", chat_class_path="vtx_lmms_eval.Vtx")
MAX_NEW_TOKENS = 256  # for tasks that set none


class Vtx(lmms):
    """A bundle that answers several requests at a time, each as it does alone.

    Args:
        bundle: the bundle's directory.
        k: a prebuilt K, "none" or "auto"; the bundle's default when left out.
        reduce: a spec of reductions, "none" for none; the bundle's first when left out. lmms-eval's command line
            separates arguments by commas, so use semicolons there: reduce=fastv:k=2;ratio=0.75.
        device: as for vtx-run.
        compute: as for vtx-run.
        threads: as for vtx-run.
        fit: as for vtx-run; "pad" for LLaVA-1.5 as its authors evaluate it.
        parallel: answers that are computed at the same time; questions about one image encode it once.
        batch_size: 1, which lmms-eval passes.
        max_batch_size: not used.

    """

    is_simple = False

    def __init__(
        self,
        bundle: str,
        k: int | str = "default",
        reduce: str = "default",
        device: str | None = None,
        compute: str | None = None,
        threads: int | None = None,
        fit: str | None = None,
        parallel: int = 8,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if str(batch_size) != "1":
            raise ValueError(f"batch_size is {batch_size}; it must be 1; set parallel in --model_args instead")
        self._model = vtx.load(bundle, device=device or "auto", compute=compute, threads=threads, fit=fit)
        self._k = k
        self._reduce = reduce.replace(";", ",")
        # Refuses what the bundle lacks before the first request.
        self._model.loaded.policy(self._k, reduce=self._reduce)
        self._engine = Engine("lmms-eval", self._model, Capacity(parallel, parallel, kept=parallel))

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """The answers, in the order of the requests."""
        results = dict[int, GenerationResult]()
        with closing(self._engine.answers(self._asked(requests))) as answers:
            for number, found in tqdm(answers, desc="vtx", total=len(requests)):
                if isinstance(found, Exception):
                    raise found
                [answer] = found
                counts = TokenCounts(input_tokens=answer.stats.prompt_tokens, output_tokens=len(answer.token_ids))
                results[number] = GenerationResult(answer.text, counts)
        return [results[number] for number in range(len(requests))]

    def _asked(self, requests: list[Instance]) -> Iterator[tuple[int, list[AnswerRequest]]]:
        for number, request in enumerate(requests):
            _, to_messages, generation, document, task, split = request.args
            messages = [_as_vtx(message) for message in to_messages(self.task_dict[task][split][document])]
            settings = Settings.of(self._k, None, {"reduce": self._reduce, **_options(generation)})
            yield number, [AnswerRequest.of_chat(self._model.loaded, messages, settings)]

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Refused: vtx gives the probabilities of its own answers, not those of given ones."""
        raise NotImplementedError("vtx answers questions; use a task with output_type generate_until")

    def generate_until_multi_round(self, requests: list[Instance]) -> NoReturn:
        """Refused: such tasks ask again after each answer."""
        raise NotImplementedError("vtx answers tasks of one round; use a task with output_type generate_until")


def _as_vtx(message: dict[str, Any]) -> dict[str, Any]:
    """A message of lmms-eval, whose images and videos are under "url": PIL images or paths."""
    content = []
    for part in message["content"]:
        if part["type"] not in ("text", "image", "video"):
            raise ValueError(f"the task shows a {part['type']}; vtx sees texts, images and videos")
        content.append(part if part["type"] == "text" else {"type": part["type"], part["type"]: part["url"]})
    return {"role": message["role"], "content": content}


def _options(generation: dict[str, Any]) -> dict[str, Any]:
    """Options from a task's generation_kwargs. Greedy unless the task samples: do_sample and a temperature."""
    if generation.get("num_beams", 1) not in (None, 1):
        raise ValueError(f"the task asks for {generation['num_beams']} beams; vtx has none, so set num_beams to 1")
    until = generation.get("until") or []
    options = {
        "max_new_tokens": int(generation.get("max_new_tokens") or MAX_NEW_TOKENS),
        "stop": [text for text in ([until] if isinstance(until, str) else until) if text],
    }
    if generation.get("do_sample", True) and generation.get("temperature"):
        options |= {name: generation[name] for name in ("temperature", "top_p", "top_k") if generation.get(name)}
    return options
