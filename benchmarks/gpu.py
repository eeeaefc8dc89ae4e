"""A bundle beside transformers on the same GPU, in turn in one run: first token per K, decode, second question, K/V.

Both sides get the same picture and question. transformers runs the checkpoint in float16, or with `--device cpu`, which
is for trying the script out, in float32. With `--genai` also onnxruntime-genai, which has no LLaVA: its decoder alone,
on a text of as many tokens. Where there is no GPU, one line says so. `--lines FILE` appends a JSON line for each side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, report
from PIL import Image

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.host.gpu import find_gpu
from vtx.runtime.host.machine import version
from vtx.runtime.policies.make import make_policy
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.strict import json_value
from vtx.tools.bench.series import shown, spread

QUESTION = "Describe everything in this picture."
SECOND = "What is in its upper left corner?"
PACKAGES = (
    "tensorrt", "tensorrt-rtx", "onnxruntime-gpu", "onnxruntime", "onnxruntime-genai-cuda",
    "onnxruntime-genai", "torch", "transformers",
)  # fmt: skip
Times = dict[str, float]


def prompt_of(model: Model, picture: Any, question: str = QUESTION) -> Prompt:
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    ids = model.loaded.text.prompt([message], picture.tokens)
    rows = model.backend.vision(picture.pixels[None])
    return Prompt(ids, ids == model.manifest.text.image_token_id, ((picture.key, lambda: rows),))


def ours(model: Model, picture: Any, tokens: int) -> Times:
    """Milliseconds of the tower, of a prefill at every K, of one token and a second question, from fresh caches.

    Of each K also the megabytes of K and V that the conversation holds.
    """
    found = {"vision": timed(lambda: model.backend.vision(picture.pixels[None]))}
    asked = prompt_of(model, picture)
    second = prompt_of(model, picture, SECOND)
    for k in (None, *model.manifest.variants):
        session = Session(model.backend, model.manifest)
        policy = make_policy(k, model.manifest, model.backend.gate)
        prefill = timed(lambda s=session, p=policy: s.prefill(asked, p))
        found[f"vision and prefill, K = {k or 'none'}"] = found["vision"] + prefill
        found[f"one token, K = {k or 'none'}"] = timed(lambda s=session: [s.decode(1) for _ in range(tokens)]) / tokens
        found[f"second question, K = {k or 'none'}"] = timed(lambda s=session, p=policy: s.prefill(second, p))
        found[f"K and V, MB, K = {k or 'none'}"] = session.kv_slots * model.backend.kv_slot_bytes / 1e6
    return found


class Theirs:
    """The checkpoint in transformers, on `device`."""

    def __init__(self, checkpoint: Path, device: str) -> None:
        import torch
        from transformers import LlavaForConditionalGeneration

        self.torch = torch
        self.device = device
        kind = torch.float16 if device == "cuda" else torch.float32
        self.model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=kind).to(device).eval()

    def run(self, ids: Any, pixels: Any, tokens: int) -> Times:
        torch = self.torch
        model = self.model
        pixels = torch.from_numpy(pixels).to(self.device, model.dtype)
        ids = torch.from_numpy(ids)[None].to(self.device)
        state: dict[str, Any] = {}

        def prefill() -> None:
            state["out"] = model(input_ids=ids, pixel_values=pixels, use_cache=True, logits_to_keep=1)
            self._wait()

        def decode() -> None:
            for _ in range(tokens):
                past = state["out"].past_key_values
                token = torch.ones((1, 1), dtype=torch.long, device=self.device)
                state["out"] = model(input_ids=token, past_key_values=past, use_cache=True)
                self._wait()

        with torch.inference_mode():
            vision = timed(lambda: (model.get_image_features(pixel_values=pixels), self._wait()))
            whole = timed(prefill)
            token = timed(decode) / tokens
        return {"vision": vision, "vision and prefill, K = none": whole, "one token, K = none": token}

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    @property
    def memory(self) -> int:
        return int(self.torch.cuda.max_memory_allocated()) if self.device == "cuda" else 0


class Genai:
    """The checkpoint's decoder in onnxruntime-genai, from a folder that its model builder made (`-e cuda -p fp16`)."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai

        self.genai = onnxruntime_genai
        self.model = onnxruntime_genai.Model(str(folder))

    def run(self, ids: Any, image_token: int, question: int, tokens: int) -> Times:
        """`ids` with text in the image's place; the second question is the last `question` of them again."""
        text = np.array([3 + n % 200 if id == image_token else id for n, id in enumerate(ids.tolist())], np.int32)
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(max_length=len(ids) + tokens + 2, min_length=len(ids) + tokens + 2, do_sample=False)
        made = self.genai.Generator(self.model, params)
        found = {"prefill, K = none": timed(lambda: (made.append_tokens(text), made.generate_next_token()))}
        decode = timed(lambda: [made.generate_next_token() for _ in range(tokens)])
        found["one token, K = none"] = decode / tokens
        made.rewind_to(len(ids) - question)
        again = timed(lambda: (made.append_tokens(text[-question:]), made.generate_next_token()))
        return {**found, "second question, K = none": again}


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    args = parser(__doc__ or "")
    args.add_argument("checkpoint", type=Path)
    args.add_argument("bundle", type=Path, help="of that checkpoint, with engines for this GPU")
    args.add_argument("--device", default="tensorrt", choices=["tensorrt", "cuda", "cpu"])
    args.add_argument("--genai", type=Path, help="a model of onnxruntime-genai with the checkpoint's decoder")
    args.add_argument("--lines", type=Path, help="append a line of JSON for each side to this file")
    args.add_argument("--rounds", type=int, default=10)
    args.add_argument("--tokens", type=int, default=32)
    given = args.parse_args()
    gpu = find_gpu()
    if gpu is None and given.device != "cpu":
        print("no NVIDIA GPU answers here: nothing measured (--device cpu tries the script out)")
        return
    model = load(given.bundle, device=given.device)
    held = model.backend.cuda.memory() if given.device == "tensorrt" else None
    theirs = Theirs(given.checkpoint, "cpu" if given.device == "cpu" else "cuda")
    rng = np.random.default_rng(0)
    picture = model.loaded.images.prepare(Image.fromarray(rng.integers(0, 256, (336, 336, 3), dtype=np.uint8)))
    prompt = prompt_of(model, picture)
    runs: dict[str, Callable[[], Times]] = {
        "vtx": lambda: ours(model, picture, given.tokens),
        "transformers": lambda: theirs.run(prompt.ids, picture.pixels[None], given.tokens),
    }
    if given.genai is not None:
        genai = Genai(given.genai)
        question = len(prompt.ids) - prompt.prefix_length
        image_token = model.manifest.text.image_token_id
        runs["onnxruntime-genai"] = lambda: genai.run(prompt.ids, image_token, question, given.tokens)
    sides: dict[str, list[Times]] = {name: [] for name in runs}
    for number in range(given.rounds + 1):
        for name in runs if number % 2 else reversed(runs):
            found = runs[name]()
            if number:  # the first round warms up
                sides[name].append(found)
    figures = {
        name: {what: spread([times[what] for times in rounds]) for what in rounds[0]} for name, rounds in sides.items()
    }
    rows = [["ms", *figures]]
    for what in dict.fromkeys(what for of_one in figures.values() for what in of_one):
        rows.append([what, *(shown(of_one[what]) if what in of_one else "" for of_one in figures.values())])
    memory = {"vtx": (held[1] - held[0]) / 1e9 if held else None, "transformers": theirs.memory / 1e9}
    if held:
        cells = [f"{memory['vtx']:.2f}, engines and buffers", f"{memory['transformers']:.2f}, peak"]
        rows.append(["memory, GB", *cells, *[""] * (len(figures) - 2)])
    print(f"GPU: {gpu.name}, compute capability {gpu.sm}" if gpu else "no GPU")
    report({"device": given.device, "tokens": given.tokens, **figures}, rows, given.json)
    if given.lines is not None:
        about = {
            "gpu": gpu.name if gpu else None,
            "driver_cuda": gpu.cuda if gpu else None,
            "device": given.device,
            "bundle": given.bundle.name,
            "precision": model.manifest.precision,
            "rounds": given.rounds,
            "prompt_tokens": len(prompt.ids),
            "versions": {name: version(name) for name in PACKAGES if version(name)},
        }
        with given.lines.open("a", encoding="utf-8") as out:
            for name, series in figures.items():
                line = {"side": name, **about, "memory_gb": memory.get(name), "ms": series}
                out.write(json.dumps(json_value(line)) + "\n")


if __name__ == "__main__":
    main()
