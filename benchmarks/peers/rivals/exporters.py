"""transformers' own exporter (`transformers.exporters`) to ONNX, on its onnxruntime runner.

It writes graphs and no loop: the embedding table, the place of the image's tokens in the prompt, the cache and the next
token are this file's. `export_for_generation` of 5.23.0 leaves out LLaVA's tower and projector, because `generate` runs
them before the model's forward; they are exported by its parts, `decompose_multimodal` and `export`. A second question
crops the cache to the image's end.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contract import TORCH, Answer, Precision, Question
from benchmarks.peers.picture import pixels

PRECISIONS = ("fp32", "int8")
REQUIREMENTS = (
    ("install", TORCH),
    ("install", "transformers==5.23.0", "onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.31.1", "pillow", TORCH),
)
PACKAGES = ("transformers", "onnxscript", "onnxruntime", "torch")
NOTE = ""
PARTS = {"image_encoder", "multi_modal_projector", "language_model", "lm_head"}
GRAPHS = "graphs"
TABLE = "embedding.npy"
SETTINGS = "preprocessor_config.json"


def prepare(checkpoint: Path, precision: str, folder: Path) -> None:
    """Raises RuntimeError where the exporter leaves out a part of the model."""
    import numpy as np
    import torch
    from transformers import LlavaForConditionalGeneration
    from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter
    from transformers.exporters.utils import decompose_multimodal, decompose_prefill_decode

    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    inputs = sample(model)
    parts = decompose_multimodal(model, inputs)
    if missing := PARTS - parts.keys():
        raise RuntimeError(f"transformers.exporters leaves out {', '.join(sorted(missing))} of this model")
    parts["decode"] = decompose_prefill_decode(model, inputs, multi_token_decode=True)["decode"]
    exporter = OnnxExporter()
    config = OnnxConfig(dynamic=True, quantizer=quantizer(Precision.parse(precision).stored))
    components: dict[str, Any] = {}
    for name, (module, arguments) in parts.items():
        components |= {name: exporter.export(module, arguments, config).components["model"]}
    ExportedModel(components, exporter.export_format, config=model.config).save_pretrained(folder / GRAPHS)
    np.save(folder / TABLE, model.get_input_embeddings().weight.detach().numpy())
    shutil.copy(checkpoint / SETTINGS, folder / SETTINGS)


def quantizer(stored: str) -> Any:
    """Its quantiser for onnxruntime, without options; None for floats."""
    from transformers.exporters import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer

    return OnnxRuntimeQuantizer(OnnxRuntimeDynamicConfig()) if stored == "int8" else None


def sample(model: Any) -> dict[str, Any]:
    """A prompt with one image, as `generate` takes it."""
    import torch

    tower = model.config.vision_config
    image = [model.config.image_token_id] * (tower.image_size // tower.patch_size) ** 2
    ids = torch.tensor([[1, 5, 6, *image, 7, 8, 9]])
    values = torch.zeros(1, 3, tower.image_size, tower.image_size)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": values}


def load(folder: Path, precision: str, threads: int) -> Loaded:
    import numpy as np
    import onnxruntime
    import torch
    from transformers.exporters import ExportedModel

    torch.set_num_threads(threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    exported = ExportedModel.from_pretrained(folder / GRAPHS, session_options=options)
    return Loaded(exported, torch.from_numpy(np.load(folder / TABLE)), folder)


class Loaded:
    def __init__(self, exported: Any, table: Any, folder: Path) -> None:
        self._runners = exported.runners
        self._config = exported.config
        self._table = table
        self._folder = folder
        self._known: tuple[str, tuple[int, ...]] | None = None
        self._cache: Any = None

    def ask(self, question: Question, new_tokens: int) -> Answer:
        import torch

        start = time.perf_counter()
        front = (question.image, question.ids[: question.front])
        vision = None
        if front == self._known:
            self._cache.crop(question.front - self._cache.get_seq_length())  # negative: that many tokens fewer
            logits = self._step(question.ids[question.front :])
        else:
            tokens = self._image_tokens(question.image)
            vision = time.perf_counter() - start
            logits = self._prefill(torch.tensor([question.ids]), tokens, question.image_token)
            self._known = front
        ids: list[int] = []
        moments: list[float] = []
        while True:
            ids.append(int(logits.argmax()))
            moments.append(time.perf_counter() - start)
            if len(ids) == new_tokens:
                return Answer(tuple(ids), tuple(moments), vision)
            logits = self._step(ids[-1:])

    def _image_tokens(self, image: str) -> Any:
        """What LlavaModel.get_image_features does around the tower, with the default selection of features."""
        import torch

        values = torch.from_numpy(pixels(Path(image), self._folder))
        states = self._runners["image_encoder"](pixel_values=values, output_hidden_states=True).hidden_states
        return self._runners["multi_modal_projector"](image_features=states[self._config.vision_feature_layer][:, 1:])

    def _prefill(self, ids: Any, tokens: Any, image_token: int) -> Any:
        import torch
        from transformers import DynamicCache

        places = ids == image_token
        embeddings = self._table[torch.where(places, 0, ids)]
        embeddings[places] = tokens.reshape(-1, embeddings.shape[-1])
        positions = torch.arange(ids.shape[1])[None]
        cache = DynamicCache(config=self._config.get_text_config())
        out = self._runners["language_model"](
            inputs_embeds=embeddings, position_ids=positions, past_key_values=cache, attention_mask=torch.ones_like(ids)
        )
        self._cache = out.past_key_values
        return self._runners["lm_head"](input=out.last_hidden_state[:, -1:])[0, -1]

    def _step(self, ids: Any) -> Any:
        import torch

        start = self._cache.get_seq_length()
        positions = torch.arange(start, start + len(ids))[None]
        out = self._runners["decode"](
            input_ids=torch.tensor([list(ids)]), position_ids=positions, past_key_values=self._cache
        )
        self._cache = out.past_key_values
        return out.logits[0, -1]
