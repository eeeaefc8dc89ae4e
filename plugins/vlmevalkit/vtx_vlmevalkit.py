"""vtx bundles as a model of VLMEvalKit: `vtx-vlmeval --config vtx.json`, with the options of VLMEvalKit's run.py."""

from __future__ import annotations

from typing import Any

import vlmeval.vlm
from vlmeval.vlm.base import BaseModel

import vtx
from vtx.runtime.api.options import Settings
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine


class Vtx(BaseModel):
    """A bundle that answers several messages at a time; the arguments come from the configuration.

    VLMEvalKit asks models with `is_api` from `--api-nproc` threads (4 by default).

    Args:
        bundle: the bundle's directory.
        k: a prebuilt K, "none" or "auto"; the bundle's default when left out.
        reduce: a spec of reductions, "none" for none; the bundle's first when left out.
        device: as for vtx-run.
        compute: as for vtx-run.
        threads: as for vtx-run.
        fit: as for vtx-run; "pad" for LLaVA-1.5 as its authors evaluate it.
        max_new_tokens: tokens of an answer, at most.
        parallel: answers that are computed at the same time, at most.

    """

    INTERLEAVE = True
    allowed_types = ("text", "image", "video")
    is_api = True

    def __init__(
        self,
        bundle: str,
        k: int | str = "default",
        reduce: str = "default",
        device: str = "auto",
        compute: str | None = None,
        threads: int | None = None,
        fit: str | None = None,
        max_new_tokens: int = 256,
        parallel: int = 8,
    ) -> None:
        super().__init__()
        self._model = vtx.load(bundle, device=device, compute=compute, threads=threads, fit=fit)
        self._settings = Settings.of(k, None, {"reduce": reduce, "max_new_tokens": max_new_tokens})
        self._model.loaded.policy(k, reduce=reduce)  # refuses what the bundle lacks before the first question
        self.VIDEO_LLM = self._model.manifest.video is not None  # else VLMEvalKit shows frames as images
        self._engine = Engine("vlmevalkit", self._model, Capacity(parallel, parallel, kept=parallel))

    def generate_inner(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        """The answer to one message: texts, and images and videos as paths."""
        content = [{"type": part["type"], part["type"]: part["value"]} for part in message]  # {"type": "text", "text"}
        messages = [{"role": "user", "content": content}]
        return self._engine.ask(AnswerRequest.of_chat(self._model.loaded, messages, self._settings)).text


def register() -> None:
    """Add the class to `vlmeval.vlm`, where VLMEvalKit looks up the classes of configurations."""
    vlmeval.vlm.Vtx = Vtx


def main() -> None:
    """VLMEvalKit's run.py with this model among its own."""
    register()
    from vlmeval.run import main as run

    run()


if __name__ == "__main__":
    main()
