"""Recording of traces: every case of a bundle, run on a backend that tracks slots and positions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.backend import NOTHING, Backend, StageCache
from vtx.runtime.bundle.bundle import MANIFEST
from vtx.runtime.bundle.safetensors import write_safetensors
from vtx.runtime.bundle.spec.manifest import MAX_BYTES, Manifest
from vtx.runtime.bundle.spec.model_spec import PARTS
from vtx.runtime.errors import RequestError
from vtx.runtime.report.golden import golden_pixels
from vtx.runtime.report.traces import files
from vtx.runtime.report.traces.cases import TraceCase, TraceQuestion, cases, images, questions
from vtx.runtime.session.encoded_images import EncodedImages, PreparedImage, selecting_text
from vtx.runtime.session.session import PrefillResult, Selection, Session
from vtx.runtime.strict import write_json
from vtx.runtime.units import Progress
from vtx.runtime.vision.preprocess import without_notes
from vtx.runtime.vision.tokens import HiddenStates, Ids, TokenStates

STEPS = 4  # tokens decoded after the first one


class PositionedCache:
    """A stage's cache that knows the position of the token in each slot; `use` is called whenever it runs.

    `parts`: the last axis of the array of positions if they have several parts; () if one.
    """

    def __init__(self, cache: StageCache, parts: tuple[int, ...], use: Callable[[PositionedCache], None]) -> None:
        self.cache = cache
        self._use = use
        self._positions: Ids = np.zeros((cache.capacity, *parts), np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    @property
    def positions(self) -> Ids:
        """[length], or [length, 3]: of the filled slots."""
        return self._positions[: self.cache.length].copy()

    def append(
        self, tokens: TokenStates, positions: Ids, *, query: bool = False, outputs: Ids | None = None
    ) -> HiddenStates:
        self._use(self)
        of_text = positions.ndim < self._positions.ndim  # whose parts are equal
        length = self.cache.length
        self._positions[length : length + len(tokens)] = positions[:, None] if of_text else positions
        return self.cache.append(tokens, positions, query=query, outputs=outputs)

    def read(self, slots: Ids) -> Any:
        return self.cache.read(slots), self._positions[slots]

    def write(self, slots: Ids, kv: Any, *, length: int) -> None:
        inner, self._positions[slots] = kv
        self.cache.write(slots, inner, length=length)


class PositionedBackend:
    """A backend whose caches know positions; `used` has the cache that each stage ran in last."""

    step = None  # tokens run through each stage's cache, which notes their positions

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self._backend = backend
        self._parts = (PARTS,) if manifest.model.rope.sections else ()
        self.used: dict[int, PositionedCache] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def stage(self, index: int, capacity: int, sources: Mapping[int, Any] = NOTHING) -> StageCache:
        if sources:  # the stage keeps nothing: these caches know the positions
            return self._backend.stage(index, capacity, {layer: cache.cache for layer, cache in sources.items()})
        use = partial(self.used.__setitem__, index)
        return cast(StageCache, PositionedCache(self._backend.stage(index, capacity), self._parts, use))


def write_traces(model: Model, folder: Path, progress: Progress = lambda *_: None) -> files.Traces:
    """Run every case of the bundle and write its traces into `folder`, which must be empty or absent."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} is not an empty directory; name another for the traces")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _write(model, folder, progress)
    except BaseException:  # the directory can then be named again
        for file in folder.iterdir():
            file.unlink()
        raise


def _write(model: Model, folder: Path, progress: Progress) -> files.Traces:
    pictures = images()
    with without_notes():
        prepared = [model.loaded.images.prepare(picture) for picture in pictures]
        sets = {
            q.images: model.loaded.images.prepare_all([pictures[n] for n in q.images])
            for q in questions(model.manifest)
        }
    for number, picture in enumerate(pictures):
        picture.save(folder / f"image-{number}.png")
    pixels = {f"pixels.{number}": golden_pixels(image.views) for number, image in enumerate(prepared)}
    write_safetensors(folder / files.IMAGES, pixels, None)
    all_cases = list(cases(model.manifest))
    traced = list[files.TracedCase]()
    for number, case in enumerate(all_cases):
        progress("cases", number, len(all_cases))
        file = f"case-{number:02d}.safetensors"
        recorder = _Recorder(model, case)
        tensors = dict[str, NDArray[Any]]()
        records = list[files.TracedQuestion]()
        for index, question in enumerate(questions(model.manifest)):
            result, recorded = recorder.ask(question, sets[question.images])
            tensors |= {f"{index}.{name}": np.ascontiguousarray(array) for name, array in recorded.items()}
            q = question
            messages = tuple(map(dict, question.messages))
            cuts = tuple(files.TracedCut(cut.layer, cut.by) for cut in result.cuts)
            reused = result.reused_tokens
            records.append(
                files.TracedQuestion(q.name, messages, q.images, q.continues, q.replaces, reused, result.k, cuts)
            )
        write_safetensors(folder / file, tensors, None)
        traced.append(files.TracedCase(case.k, case.reduce, file, tuple(records), case.rest))
    progress("cases", len(all_cases), len(all_cases))
    traces = files.Traces(
        format=files.FORMAT,
        runtime=f"vtx {model.manifest.vtx}",
        manifest=hashlib.sha256(model.bundle.files.read(MANIFEST, MAX_BYTES, links=False)).hexdigest(),
        device=model.backend.device,
        compute=model.backend.compute,
        steps=STEPS,
        layers=model.manifest.model.layers,
        images=tuple(files.TracedImage(f"image-{n}.png", image.key) for n, image in enumerate(prepared)),
        cases=tuple(traced),
    )
    (folder / files.INDEX).write_text(write_json(traces), encoding="utf-8")
    return traces


class _Recorder:
    def __init__(self, model: Model, case: TraceCase) -> None:
        self._model = model
        self._case = case
        self._backend = PositionedBackend(model.backend, model.manifest)
        self._session = Session(cast(Backend, self._backend), model.manifest)
        self._selection: Selection | None = None

    def ask(
        self, question: TraceQuestion, prepared: Sequence[PreparedImage]
    ) -> tuple[PrefillResult, dict[str, NDArray[Any]]]:
        """Prefill and decode greedily; returns the result and the recorded tensors."""
        model = self._model
        messages = question.messages
        k: int | str = int(self._case.k) if self._case.k.isdigit() else self._case.k
        policy = model.loaded.policy(k, Options(rest=self._case.rest), self._case.reduce)
        after = self._selection if question.continues else None
        ids = model.loaded.prompts.ids(messages, prepared)
        token = model.manifest.text.image_token_id
        text = selecting_text(
            model.backend, ids, token, policy, after, partial(model.loaded.prompts.embed_question, messages)
        )
        images = EncodedImages(model.backend, tuple(prepared))
        expand = partial(model.loaded.text.prompt, messages)
        prompt = images.prompt(ids, token, policy, text, expand)
        result = self._session.prefill(prompt, policy, after=after)
        self._selection = result.selection
        recorded: dict[str, NDArray[Any]] = {"ids": prompt.ids, "is_vision": prompt.is_vision.astype(np.uint8)}
        recorded |= {f"kept.{number}": cut.kept.astype(np.uint8) for number, cut in enumerate(result.cuts)}
        recorded |= {f"positions.{layer}": positions for layer, positions in self._by_layer().items()}
        logits = [result.logits.copy()]
        for _ in range(STEPS):
            logits.append(self._session.decode(int(logits[-1].argmax())).copy())
        recorded |= {f"decoded.{layer}": positions[-STEPS:] for layer, positions in self._by_layer().items()}
        recorded |= {"tokens": np.array([int(row.argmax()) for row in logits], np.int64), "logits": np.stack(logits)}
        return result, recorded

    def _by_layer(self) -> dict[int, Ids]:
        """Of each layer the positions of the slots that it reads."""
        model = self._model.manifest.model
        stages = enumerate(self._model.manifest.stages)
        stage_of = {layer: i for i, stage in stages for layer in range(stage.first, stage.last + 1)}
        return {layer: self._backend.used[stage_of[model.source(layer)]].positions for layer in stage_of}
