"""The independent reference: transformers' own model, and VTW stated over its layers without a cache."""

from __future__ import annotations

import hashlib
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from tests.support.families.fast_vlm import load_fast_vlm
from tests.support.families.gemma import gemma3_logits, gemma4_logits, with_layer_inputs
from tests.support.families.lfm2_vl import PillowProcessor, with_common_names
from tests.support.families.lfm3_vl import lfm3_mask
from tests.support.families.minicpm import processor_of, video_inputs
from tests.support.families.pixtral import processor_of as pixtral_processor
from tests.support.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from PIL import Image

    from tests.support.tiny import Message

Inputs = dict[str, Any]
OF_PATCHES = ("pixel_attention_mask", "spatial_shapes", "target_sizes")
Answers = TypeVar("Answers", bound="Callable[..., Any]")


def computed_once(answer: Answers) -> Answers:
    """For methods of `inputs`: tests ask a model the same again and again, and nobody changes its weights meanwhile.

    What is given by name does not change the answer.
    """

    @wraps(answer)
    def ask(self: Any, inputs: Inputs, *how: Any, **hints: Any) -> Any:
        digest = hashlib.sha256()
        for name, value in sorted(inputs.items()):
            digest.update(
                f"{name} {value.dtype} {tuple(value.shape)}".encode()
                + bytes(value.reshape(-1).view(torch.uint8).numpy())
            )
        key = type(self), answer.__name__, digest.digest(), repr(how)
        if key not in self.answers:
            self.answers[key] = answer(self, inputs, *how, **hints)
        return self.answers[key]

    return ask  # type: ignore[return-value]


class Greedy(NamedTuple):
    """`ids`, as many as asked for; `logits` [n, vocab], row t chose ids[t]; `prompt` [vocab] is row 0."""

    ids: list[int]
    logits: torch.Tensor
    prompt: torch.Tensor

    @property
    def margin(self) -> float:
        """The smallest lead of a chosen logit over the next; below the tolerance on logits, ids prove nothing."""
        first, second = self.logits.topk(2).values.T
        return float((first - second).min())


class Reference:
    """A checkpoint loaded by transformers; K is 1-based, the first layer without vision rows, or None."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> None:
        from transformers import AutoModelForImageTextToText

        torch.set_num_threads(1)
        self.answers: dict[Any, Any] = {}
        self.kind = kind = read_json(folder / "config.json")["model_type"]
        self.model: Any = (
            load_fast_vlm(folder)
            if kind == "fast_vlm"
            else AutoModelForImageTextToText.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, local_files_only=True
            )
        )
        self.model.train(False)
        if self.model.config.model_type.endswith("_moe"):  # a loop over experts, which any type has
            self.model.set_experts_implementation("eager")
        self.processor: Any = self._processor(folder)
        self.tokenizer = self.processor.tokenizer
        # Transformers' processor looks for a template everywhere but in tokenizer_config.json.
        self.template = self.processor.chat_template or self.tokenizer.chat_template
        inner = self.model.model
        self.decoder: Any = inner.text_model if hasattr(inner, "text_model") else inner.language_model
        if self.model.config.model_type == "lfm2_vl":
            with_common_names(self.decoder)
        if kind == "lfm3_vl":
            self.decoder.norm = self.decoder.embedding_norm
        self.layers = len(self.decoder.layers)
        text = self.decoder.config  # what Granite multiplies with; transformers 5 leaves the last one out in LlavaNext
        self.scale = getattr(text, "embedding_multiplier", 1.0)
        self.decoder.norm.weight.data /= getattr(text, "logits_scaling", 1.0)
        self.image_token = self.model.config.image_token_id
        self.two_way = self.model.config.model_type == "paligemma"  # all of a prompt sees itself
        self.video_token = getattr(self.model.config, "video_token_id", None) or -1
        self.eos = self.model.generation_config.eos_token_id
        self.model.generation_config.eos_token_id = None  # the reference answers to full length

    def _processor(self, folder: Path) -> Any:
        """Transformers' own; of families with videos without the part for them, which needs torchvision."""
        import transformers
        from transformers import AutoProcessor, AutoTokenizer

        config = self.model.config
        processors = {
            "internvl": ("GotOcr2ImageProcessorPil", "InternVLProcessor"),
            "llava_onevision": ("LlavaOnevisionImageProcessorPil", "LlavaOnevisionProcessor"),
            "llava_next_video": ("LlavaNextImageProcessorPil", "LlavaNextVideoProcessor"),
            "video_llava": ("VideoLlavaImageProcessor", "VideoLlavaProcessor"),
            "qwen2_vl": ("Qwen2VLImageProcessorPil", "Qwen2VLProcessor"),
            "qwen2_5_vl": ("Qwen2VLImageProcessorPil", "Qwen2_5_VLProcessor"),
            "qwen3_vl": ("Qwen2VLImageProcessorPil", "Qwen3VLProcessor"),
            "qwen3_vl_moe": ("Qwen2VLImageProcessorPil", "Qwen3VLProcessor"),
            "qwen3_5": ("Qwen2VLImageProcessorPil", "Qwen3VLProcessor"),
            "qwen3_5_moe": ("Qwen2VLImageProcessorPil", "Qwen3VLProcessor"),
            "idefics3": ("Idefics3ImageProcessorPil", "Idefics3Processor"),
            # its own processor needs another package, for numbers in words; an image's text is Idefics3's
            "smolvlm": ("SmolVLMImageProcessorPil", "Idefics3Processor"),
            "gemma4": ("Gemma4ImageProcessorPil", "Gemma4Processor"),
            "glm_ocr": ("Glm46VImageProcessorPil", "Glm46VProcessor"),
            "paddleocr_vl": ("PaddleOCRVLImageProcessorPil", "PaddleOCRVLProcessor"),
            "lfm3_vl": ("Qwen2VLImageProcessorPil", "Lfm3VlProcessor"),
        }
        if config.model_type == "lfm2_vl":
            from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

            class OnPillow(Lfm2VlProcessor):
                def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
                    return None

            settings = read_json(folder / "preprocessor_config.json")
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            return OnPillow(PillowProcessor(settings), tokenizer, chat_template=template)
        if config.model_type == "minicpmv4_6":
            return processor_of(folder)
        if config.vision_config.model_type == "pixtral":
            return pixtral_processor(folder)
        if config.model_type not in processors:
            return AutoProcessor.from_pretrained(folder, backend="pil", local_files_only=True)  # type: ignore[no-untyped-call]
        of_images, of_all = (getattr(transformers, name) for name in processors[config.model_type])
        settings: dict[str, Any] = {"image_seq_length": getattr(config, "image_seq_length", None)}
        if config.model_type.startswith(("qwen", "glm", "lfm3", "paddleocr")):
            settings = {}
        if config.model_type == "gemma4":
            settings = {"feature_extractor": None, "video_processor": None}
        if config.model_type in ("llava_next_video", "video_llava"):
            settings = {"patch_size": config.vision_config.patch_size, "num_additional_image_tokens": 1}
            settings["vision_feature_select_strategy"] = config.vision_feature_select_strategy
        if config.model_type in ("idefics3", "smolvlm"):
            tower = config.vision_config
            settings = {"image_seq_len": (tower.image_size // tower.patch_size // config.scale_factor) ** 2}
        if config.model_type == "llava_onevision":
            side = config.vision_config.image_size // config.vision_config.patch_size
            settings = {"num_image_tokens": side**2, "vision_feature_select_strategy": "full"}
            settings["vision_aspect_ratio"] = config.vision_aspect_ratio

        class WithoutVideos(of_all):  # type: ignore[misc,valid-type]
            def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
                return None if value is None else super().check_argument_for_proper_class(name, value)

        return WithoutVideos(
            image_processor=of_images.from_pretrained(folder, local_files_only=True),
            tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
            chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
            **settings,
        )

    def inputs(self, messages: list[Message], images: list[Image.Image], videos: Sequence[Any] = ()) -> Inputs:
        """`input_ids` and `attention_mask` [1, S+V+T], `pixel_values` [images, 3, H, W] where there are images.

        With tiles `pixel_values` are [images, tiles, 3, H, W], and `image_sizes` (height, width) go with them. The
        images take the placeholders in their order, and so do `videos`, which are given as pixel values; those of
        Qwen-VL as pairs of frames [pairs, 2, 3, H, W], each with its clip; MiniCPM-V 4.6's as vtx takes them.
        """
        left = iter(images)
        filled = [
            message
            if isinstance(message["content"], str)
            else message
            | {
                "content": [
                    part | {"image": next(left)} if part["type"] == "image" else part for part in message["content"]
                ]
            }
            for message in messages
        ]
        if next(left, None) is not None:
            raise ValueError(f"{len(images)} images are more than the placeholders")
        if self.two_way:  # no template: the processor itself makes the prompt
            (question,) = (part["text"] for part in messages[0]["content"] if part["type"] == "text")
            text = "<image>" * len(images) + question
            return dict(self.processor(images=[images], text=[text], return_tensors="pt"))
        if videos:
            return self._with_videos(messages, images, videos)
        found = self.processor.apply_chat_template(
            filled, self.template, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return _renamed(found)

    def _with_videos(self, messages: list[Message], images: list[Image.Image], videos: Sequence[Any]) -> Inputs:
        """Transformers' processor asked with videos that its part for videos is spared."""
        processor = self.processor
        if self.kind == "minicpmv4_6":
            text = processor.apply_chat_template(messages, self.template, add_generation_prompt=True, tokenize=False)
            return video_inputs(processor, text, images, videos)
        processor.video_processor = lambda given, **_: {"pixel_values_videos": torch.stack(given)}
        text = processor.apply_chat_template(messages, self.template, add_generation_prompt=True, tokenize=False)
        if self.kind.startswith(("qwen", "lfm3")):
            clips = [clip for _, clip in videos]
            processor.video_processor = PairsOfFrames(self.model.config.vision_config.patch_size, clips)
            videos = [pairs.flatten(0, 1) for pairs, _ in videos]
        if self.kind.startswith(
            "qwen3"
        ):  # whose first processor left out the marks around a video that are in its template
            text = text.replace("<|vision_start|><video><|vision_end|>", "<video>")
        found = processor(images=[images] if images else None, text=text, videos=list(videos), return_tensors="pt")
        del processor.video_processor
        return _renamed({name: value for name, value in found.items() if name != "video_metadata"})

    def _named(self, inputs: Inputs) -> Inputs:
        """Older releases of transformers have a name of their own for Video-LLaVA's pixel values."""
        if "pixel_values" in signature(self.model.model.get_image_features).parameters:
            return inputs
        return {"pixel_values_images" if name == "pixel_values" else name: value for name, value in inputs.items()}

    @computed_once
    @torch.inference_mode()
    def generate_hf(self, inputs: Inputs, n: int) -> tuple[list[int], torch.Tensor]:
        """Transformers' own greedy answer without withdrawal: `n` ids and logits [n, vocab] in float32."""
        done = self.model.generate(
            **self._named(inputs), max_new_tokens=n, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return done.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(done.logits).float()

    @computed_once
    @torch.inference_mode()
    def greedy(self, inputs: Inputs, k: int | None, n: int, *, guess: Sequence[int] = ()) -> Greedy:
        """The greedy answer of `n` ids with withdrawal at K, everything recomputed for every token.

        As many ids as agree with `guess` are computed in one pass; whatever it holds, the answer is the same.
        """
        return self.answer(*self.prompt(inputs), self.positions(inputs), self.maps(inputs), k, n, guess)

    @torch.inference_mode()
    def answer(
        self, prompt: torch.Tensor, is_image: torch.Tensor, start: torch.Tensor, maps: Sequence[torch.Tensor],
        k: int | None, n: int, guess: Sequence[int] = (),
    ) -> Greedy:  # fmt: skip
        """As `greedy`, to rows [1, m, hidden] at positions from `start` on, those of `is_image` [m] gone from K on."""
        guess = [] if self.kind.startswith("gemma") else list(guess)  # whose logits come one at a time
        ids: list[int] = []
        logits: list[torch.Tensor] = []
        while len(ids) < n:
            ahead = guess[len(ids) : n - 1] if guess[: len(ids)] == ids else []
            count = len(ids) + len(ahead)
            answered = torch.tensor([[*ids, *ahead]], dtype=torch.int64)
            rows = self.decoder.embed_tokens(answered)
            if self.kind == "gemma4" and count:
                rows = with_layer_inputs(self.decoder, rows, answered)
            later = (start.max() + 1 + torch.arange(count)).expand(*start.shape[:-1], count)
            found = self.next_logits(
                torch.cat([prompt, rows], 1) if count else prompt,
                torch.cat([is_image, torch.zeros(count, dtype=torch.bool)]), k, torch.cat([start, later], -1), maps,
                answered=count, last=len(ahead) + 1,
            )  # fmt: skip
            for row, guessed in zip(found, [*ahead, None], strict=True):
                logits.append(row)
                ids.append(int(row.argmax()))
                if ids[-1] != guessed:
                    break
        return Greedy(ids, torch.stack(logits), logits[0])

    @computed_once
    @torch.inference_mode()
    def logits(self, inputs: Inputs, k: int | None) -> torch.Tensor:
        """Next-token logits [vocab] in float32 at the last prompt position."""
        return self.last_logits(*self.prompt(inputs), k, self.positions(inputs), self.maps(inputs))

    def kv_slots(self, inputs: Inputs, k: int | None) -> list[int]:
        """Per layer the KV entries that the prompt fills: S+V+T before K, S+T from K on."""
        vision = self._vision(inputs)
        full_layers = self._full_layers(k)
        text = int((~vision).sum())
        slots = [len(vision)] * full_layers + [text] * (self.layers - full_layers)
        attends = [
            getattr(layer, "is_attention_layer", True) and not hasattr(layer, "linear_attn")
            for layer in self.decoder.layers
        ]
        sharing = getattr(self.decoder.config, "num_kv_shared_layers", 0)  # which keep nothing
        attends[self.layers - sharing :] = [False] * sharing
        return [count * there for count, there in zip(slots, attends, strict=True)]

    def _full_layers(self, k: int | None) -> int:
        if k is None:
            return self.layers
        if not 2 <= k <= self.layers:
            raise ValueError(f"K is {k}, this model allows 2 to {self.layers}")
        return k - 1

    def _vision(self, inputs: Inputs) -> torch.Tensor:
        ids: torch.Tensor = inputs["input_ids"][0]
        vision: torch.Tensor = (ids == self.image_token) | (ids == self.video_token)
        return vision

    def prompt(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedded rows [1, S+V+T, hidden] and which of them are vision rows [S+V+T]."""
        vision = self._vision(inputs)
        rows = self.decoder.embed_tokens(inputs["input_ids"])
        if inputs.get("pixel_values") is not None:
            names = (
                "pixel_values",
                "image_sizes",
                "batch_num_images",
                "image_grid_thw",
                "image_position_ids",
                *OF_PATCHES,
            )
            pictures = {name: inputs[name] for name in names if name in inputs}
            features = self.model.model.get_image_features(**self._named(pictures)).pooler_output
            rows[0, inputs["input_ids"][0] == self.image_token] = torch.cat(list(features)).to(rows.dtype)
        if inputs.get("pixel_values_videos") is not None:
            grids = {name: inputs[name] for name in ("video_grid_thw", "target_sizes_videos") if name in inputs}
            found = self.model.model.get_video_features(inputs["pixel_values_videos"], **grids).pooler_output
            frames = torch.cat([each.reshape(-1, rows.shape[-1]) for each in found])
            rows[0, inputs["input_ids"][0] == self.video_token] = frames.to(rows.dtype)
        if self.kind == "gemma4":
            padded = inputs["input_ids"].masked_fill(vision, self.decoder.config.pad_token_id)
            rows = with_layer_inputs(self.decoder, rows, padded)
        return rows, vision

    def maps(self, inputs: Inputs) -> list[torch.Tensor]:
        """What Qwen3-VL adds to all images' and videos' rows [rows, hidden], after one of the first layers each."""
        if self.model.config.model_type not in ("qwen3_vl", "qwen3_vl_moe"):
            return []
        ids, inner = inputs["input_ids"][0][self._vision(inputs)], self.model.model
        kinds = [("pixel_values", "image_grid_thw", self.image_token, inner.get_image_features)]
        kinds += [("pixel_values_videos", "video_grid_thw", self.video_token, inner.get_video_features)]
        maps = list[torch.Tensor]()
        for pixels, grid, token, features in kinds:
            for number, each in enumerate(
                features(inputs[pixels], inputs[grid]).deepstack_features if inputs.get(pixels) is not None else ()
            ):
                own = each if isinstance(each, torch.Tensor) else torch.cat(each)
                maps += [torch.zeros(len(ids), own.shape[-1])] if number == len(maps) else []
                maps[number][ids == token] = own
        return maps

    def positions(self, inputs: Inputs) -> torch.Tensor:
        """Of the prompt's rows, [1, n], or [3, 1, n] where transformers makes three parts of them."""
        ids = inputs["input_ids"]
        if not hasattr(self.model.model, "get_rope_index"):
            return torch.arange(ids.shape[1])[None]
        further = {name: inputs[name] for name in ("video_grid_thw", "second_per_grid_ts") if name in inputs}
        made: torch.Tensor = self.model.model.get_rope_index(
            ids, mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw"), **further
        )[0]
        return made

    def last_logits(
        self, rows: torch.Tensor, vision: torch.Tensor, k: int | None, positions: torch.Tensor | None = None,
        maps: Sequence[torch.Tensor] = (), answered: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """The logits after `rows`, of which the last `answered` are of the answer."""
        return self.next_logits(rows, vision, k, positions, maps, answered)[0]

    def next_logits(
        self, rows: torch.Tensor, vision: torch.Tensor, k: int | None, positions: torch.Tensor | None = None,
        maps: Sequence[torch.Tensor] = (), answered: int = 0, last: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """The logits [last, vocab] after each of the last `rows`, of which the last `answered` are of the answer."""
        if self.kind == "gemma4":
            return gemma4_logits(self.model, rows, vision, k)[None]
        if self.kind == "gemma3":
            return gemma3_logits(self.model, rows, vision, {} if k is None else {k: ~vision})[None]
        decoder, rows = self.decoder, rows * self.scale
        full_layers = self._full_layers(k)
        positions = torch.arange(rows.shape[1])[None] if positions is None else positions
        for number, layer in enumerate(decoder.layers[:full_layers]):
            rows = self.run([layer], rows, positions, answered)
            if number < len(maps):
                rows[0, vision] += maps[number]
        if full_layers < self.layers:
            rows = self.run(decoder.layers[full_layers:], rows[:, ~vision], positions[..., ~vision], answered)
        out: torch.Tensor = self.model.lm_head(decoder.norm(rows[:, -last:]))[0].float()
        cap = getattr(decoder.config, "final_logit_softcapping", None)
        return out if cap is None else cap * torch.tanh(out / cap)

    def run(
        self, layers: Iterable[torch.nn.Module], rows: torch.Tensor, positions: torch.Tensor, answered: int = 0
    ) -> torch.Tensor:
        """`layers` over `rows` [1, n, hidden], each row seeing itself and the rows before it.

        Where prompts see themselves both ways, so do all rows but the last `answered`.
        """
        count = rows.shape[1]
        mask = torch.full((1, 1, count, count), torch.finfo(rows.dtype).min, dtype=rows.dtype).triu(1)
        if self.two_way:
            mask[..., : count - answered, : count - answered] = 0
        if self.kind == "lfm3_vl":
            return self._by_kind(layers, rows, positions, mask)
        rope = self.decoder.rotary_emb(rows, position_ids=positions)
        for layer in layers:
            attends = getattr(layer, "is_attention_layer", True) and not hasattr(layer, "linear_attn")
            seen = mask if attends else None  # a convolution sees its neighbours, and the delta rule those before
            rows = layer(rows, attention_mask=seen, position_ids=positions, position_embeddings=rope)
        return rows

    def _by_kind(
        self, layers: Iterable[torch.nn.Module], rows: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """As `run`, of LFM3's layers, which slide, see everything before, or are a convolution."""
        text = self.decoder.config
        ropes = {
            kind: self.decoder.rotary_emb(rows, position_ids=positions, layer_type=kind)
            for kind in self.decoder.rotary_emb.layer_types
        }
        masks = {"full_attention": mask, "sliding_attention": lfm3_mask(mask, positions, text.sliding_window or 0)}
        every = [*self.decoder.layers]
        for layer in layers:
            kind = text.layer_types[next(number for number, other in enumerate(every) if other is layer)]
            rows = layer(
                rows, attention_mask=masks.get(kind), position_ids=positions, position_embeddings=ropes.get(kind)
            )
        return rows


class PairsOfFrames:
    """Qwen's video processors for prepared frames [frames, 3, height, width] of `clips`.

    Transformers' own need torchvision.
    """

    merge_size = temporal_patch_size = 2

    def __init__(self, patch: int, clips: Sequence[Any]) -> None:
        self.patch, self.clips = patch, clips

    def __call__(self, videos: Sequence[torch.Tensor], **_: Any) -> Inputs:
        from transformers.video_utils import VideoMetadata

        pixels, grids, about = list[torch.Tensor](), list[list[int]](), list[Any]()
        for frames, clip in zip(videos, self.clips, strict=True):
            (count, colours, high, wide), side = (len(frames) // 2, *frames.shape[1:]), self.patch
            rows, columns = high // side, wide // side
            parts = frames.reshape(count, 2, colours, rows // 2, 2, side, columns // 2, 2, side)
            parts = parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
            pixels.append(parts.reshape(count * rows * columns, -1))
            grids.append([count, rows, columns])
            about.append(VideoMetadata(clip.count, clip.rate, frames_indices=[*clip.numbers]))
        found = {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}
        return found | {"video_metadata": about}


def _renamed(found: Any) -> Inputs:
    """Video-LLaVA's image processor has a name of its own for what its model calls `pixel_values`."""
    return {name.removesuffix("_images") if name == "pixel_values_images" else name: found[name] for name in found}
