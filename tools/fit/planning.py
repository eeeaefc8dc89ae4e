"""Times and memory of a bundle on a device that is not here: vtx-plan's estimates for what an answer really ran."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vtx.runtime.api.answer import Answer
from vtx.runtime.backends.engines import AUTO, ENGINES
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.spec.stored import Precisions
from vtx.runtime.errors import RequestError
from vtx.runtime.host.profiles import Profile
from vtx.runtime.policies import parse
from vtx.runtime.precision import KV_DTYPES
from vtx.tools.bench.methods import NONE
from vtx.tools.estimate import flops
from vtx.tools.estimate.plan import PlannedMethods, PlannedPrompt, Workload, latency, make_plan
from vtx.tools.estimate.sizes import ModelSize, bundle_size
from vtx.tools.estimate.weights import precisions_of
from vtx.tools.tensorrt.support import EngineSupport, choose_engine, engines_on

TEXT = 64  # tokens of a question, for the memory


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine of a device that is known by its profile, for one bundle."""

    profile: Profile
    engine: EngineSupport
    size: ModelSize
    precisions: Precisions
    memory: int

    @classmethod
    def of(cls, bundle: Bundle, profile: Profile, device: str, max_new_tokens: int) -> PlannedEngine:
        """The engine `device`, or the first that answers there.

        Raises RequestError, UnsupportedModelError: none answers, or the bundle has no graphs for it.
        """
        manifest = bundle.manifest
        size = bundle_size(bundle)
        parts = precisions_of(size, manifest.precision, manifest.vision_precision, manifest.head_precision)
        parts = replace(parts, kv=KV_DTYPES[manifest.kv_dtype].name)
        engines = engines_on(profile, size, {manifest.precision: parts})
        candidates = [engine for engine in engines if engine.answered and engine.dialect in manifest.dialects]
        engine = choose_engine(
            candidates or engines if device == AUTO else engines, None if device == AUTO else device, None
        )
        if engine.dialect not in manifest.dialects:
            raise RequestError(
                f"{engine.software} of {profile.name} reads graphs of the {engine.dialect!r} dialect and "
                f"{bundle.folder.name} holds none; export it with --dialect ort,{engine.dialect}, or name another "
                "engine with --device"
            )
        work = Workload(TEXT, size.vision.image_tokens if size.vision else 0, max_new_tokens)
        cost = make_plan(
            size,
            work,
            PlannedMethods([None]),
            {manifest.precision: parts},
            profile,
            engine=engine.cost,
        )
        return cls(profile, engine, size, parts, cost.depths[0].precisions[manifest.precision].peak_bytes)

    @property
    def device(self) -> str:
        return self.engine.device

    @property
    def compute(self) -> str:
        """The engine's default arithmetic."""
        return next(iter(ENGINES[self.device].compute))

    def times(self, answer: Answer, views: int) -> tuple[float, float]:
        """Milliseconds until the first token and for a further one, of an answer to images of that many `views`."""
        stats = answer.stats
        size = self.size.seeing(answer.stats.vision_tokens)
        reductions = () if stats.reduce == NONE else parse(stats.reduce)
        layers_ahead = sorted(layer for part in reductions for layer in part.needs().ahead)
        text = stats.prompt_tokens - stats.vision_tokens
        again = flops.ahead_flops(size.decoder, [count - text for count in stats.kv_slots], layers_ahead, text=text)
        cache = sum(flops.kv_bytes(size.decoder, stats.kv_slots, KV_DTYPES[self.precisions.kv_dtype].bytes))
        kv_bytes = self.engine.cost.passes * cache
        prompt = PlannedPrompt(views, stats.kv_slots, again)
        phases = latency(size, prompt, self.precisions, self.profile, self.engine.cost, kv_bytes)
        return phases["vision"].ms + phases["prefill"].ms, phases["decode_per_token"].ms
