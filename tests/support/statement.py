"""MustDrop, FastV, CDPruner, DART, window merging and CLS pruning stated plainly over transformers' modules.

No graph, no stage, no reuse: every layer is computed with its full attention matrix, and what each layer's
cache holds is written down row by row. This is what the product's runs are compared with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.clip import Clip
from tests.support.reference import OF_PATCHES, Inputs, Reference, computed_once
from tests.support.selection import (
    cdpruner,
    dart_before,
    divprune,
    half_turned,
    highest,
    hiprune,
    merge_windows,
    neighbours_turned,
    share_of,
    visionzip,
)
from tests.support.statement_records import Cache, Image, Method, Outcome, Row
from tests.support.tiny import MARKED


class Statement:
    def __init__(self, reference: Reference, clip: Clip | None = None) -> None:
        self._reference, self._clip = reference, clip
        self.answers: dict[Any, Any] = reference.answers if clip is None else {}
        model = reference.model
        self._tower = getattr(model.model, "vision_tower", None) or getattr(model.model, "image_tower", None)
        self._projector = getattr(model.model, "multi_modal_projector", None)
        self._decoder, self._head, self._config = reference.decoder, model.lm_head, model.config

    @computed_once
    @torch.inference_mode()
    def answer(self, inputs: Inputs, method: Method, n: int, asked: str = "") -> Outcome:
        """The greedy answer of `n` ids under `method`; `asked` is the question as a text tower is given it."""
        out = Outcome()
        ids = inputs["input_ids"][0].tolist()
        images = self._images(inputs, method)
        out.images = [self._selected(image, ids, method, asked) for image in images]
        caches, hidden = self.prompt(ids, out, method)
        out.slots = [len(cache.rows) for cache in caches]
        out.vision = [sum(row.image is not None for row in cache.rows) for cache in caches]
        position = self.next_position
        logits = [self.logits(hidden)]
        while True:
            out.ids.append(int(logits[-1].argmax()))
            if len(out.ids) == n:
                break
            logits.append(self.logits(self.step(out.ids[-1], position, caches, method)))
            position += 1
        out.logits = torch.stack(logits)
        return out

    # ---- the tower ---------------------------------------------------------------------------------------------------

    def _images(self, inputs: Inputs, method: Method) -> list[Image]:
        """The images of a prompt before anything of the question is known."""
        pixels, sizes = inputs.get("pixel_values"), inputs.get("image_sizes")
        if "pixel_values_videos" in inputs:
            return self._played(inputs)
        if pixels is None:
            return []
        if self._config.model_type in (
            "fast_vlm",
            "internvl",
            "llava_onevision",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "lfm2_vl",
            "minicpmv4_6",
            "glm_ocr",
            "paddleocr_vl",
            *MARKED,
        ) or (self._config.vision_config.model_type == "pixtral"):
            return self._given(inputs)
        if sizes is None:
            images, counts = [self.image(image, method) for image in pixels], method.visionzip
            if counts is not None:
                images = [self._zipped([image.tower], 1, counts, len(image.rows)) for image in images]
            return images
        return [self._tiled(image, size, method) for image, size in zip(pixels, sizes, strict=True)]

    def _given(self, inputs: Inputs) -> list[Image]:
        """Images whose tokens are no patches, as transformers makes them; each, or each tile, is a run."""
        names = ("pixel_values", "image_sizes", "batch_num_images", "image_grid_thw", *OF_PATCHES)
        pictures = {name: inputs[name] for name in names if name in inputs}
        found = self._reference.model.model.get_image_features(**pictures)
        features = torch.cat([*found.pooler_output])
        if "image_grid_thw" in inputs:
            grids = (inputs["image_grid_thw"][:, 1:] // 2).tolist()
            parts = features.split([rows * columns for rows, columns in grids])
            images = [self._placed(part, *grid) for part, grid in zip(parts, grids, strict=True)]
            for number, image in enumerate(images):
                image.maps = [each[number] for each in getattr(found, "deepstack_features", ())]
            return images
        is_image = inputs["input_ids"][0] == self._reference.image_token
        runs = [len(list(run)) for there, run in groupby(is_image.tolist()) if there]
        images = [self._whole(rows) for rows in features.split(runs)]
        if self._config.model_type == "internvl":
            each = self._config.image_seq_length
            for image in images:
                image.of_tile = [i // each for i in range(len(image.rows))] if len(image.rows) > each else []
        return images

    def _played(self, inputs: Inputs) -> list[Image]:
        """One video of Qwen-VL's, as transformers makes its rows: of Qwen3-VL each pair of frames is a run."""
        found = self._reference.model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        rows, maps = torch.cat([*found.pooler_output]), getattr(found, "deepstack_features", None) or ()
        (pairs, down, across), three = inputs["video_grid_thw"][0].tolist(), self._config.model_type.startswith("qwen3")
        down, across = down // 2, across // 2
        if not three:
            each = float(inputs["second_per_grid_ts"][0]) if "second_per_grid_ts" in inputs else 1.0
            each *= getattr(self._config.vision_config, "tokens_per_second", 1)
            one = self._placed(rows[: down * across], down, across)
            offsets = [np.array([int(pair * each), 0, 0]) + offset for pair in range(pairs) for offset in one.offsets]
            return [replace(self._whole(rows), offsets=offsets, span=int(np.max(offsets)) + 1)]
        images = [self._placed(part, down, across) for part in rows.split(down * across)]
        flat = [each if isinstance(each, Tensor) else torch.cat([*each]) for each in maps]
        for number, image in enumerate(images):
            image.maps = [each.split(down * across)[number] for each in flat]
        return images

    @staticmethod
    def _whole(rows: Tensor) -> Image:
        count = len(rows)
        return Image(rows, [*range(count)], [False] * count, None, [None] * count, rows, placeholders=count)

    def _placed(self, rows: Tensor, down: int, across: int) -> Image:
        """An image whose rows stand at their row and column, and whose text goes on after the longer side."""
        offsets = [np.array([0, row, column]) for row in range(down) for column in range(across)]
        return replace(self._whole(rows), offsets=offsets, span=max(down, across))

    def image(self, pixels: Tensor, method: Method) -> Image:
        """One image [3, side, side] to its rows, merged and pruned before the decoder."""
        clip = hasattr(self._tower, "pre_layrnorm")
        x = self._tower.embeddings(pixels[None])[0]
        if clip:
            x = self._tower.pre_layrnorm(x)
        places = [-1] * clip + list(range(len(x) - clip))
        merged, similarity = [False] * len(x), [None] * len(x)
        states, attention, keys, received = [x], None, x, list[Tensor]()
        blocks = self._tower.encoder.layers
        wanted = self._feature_layers(len(blocks))
        looked_at = max(wanted) if method.keys == "used-block" else len(blocks)
        for number, layer in enumerate(blocks[: max(looked_at, *wanted)], start=1):
            if method.hiprune is not None and number in (method.hiprune[2], max(wanted)):
                received.append(self._attention(layer, x).mean(0).mean(0))
            if number == looked_at and clip:
                attention = self._class_attention(layer, x)
                keys = layer.self_attn.k_proj(layer.layer_norm1(x)).view(len(x), layer.self_attn.num_heads, -1).mean(1)
            x = layer(x[None], None)[0]
            if number == 1 and method.tau is not None:
                x, places, merged, similarity = merge_windows(x, places, method.tau)
            states.append(x)
        first = int(getattr(self._config, "vision_feature_select_strategy", "default") == "default")
        features = torch.cat([states[number][first:] for number in wanted], -1)
        given = None if attention is None else attention.tolist()[first:]
        hidden = states[wanted[0]][first:]
        image = Image(self._projector(features), places[first:], merged[first:], given, similarity[first:], hidden)
        if method.order == "merged-first":
            windows = [i for i, is_window in enumerate(image.merged) if is_window]
            windows.sort(
                key=lambda i: image.similarity[i] or 0.0, reverse=True
            )  # of equal ones the earlier stays first
            cls = [i for i, place in enumerate(image.places) if place < 0]
            image = image.take([*cls, *windows, *(i for i in range(len(image.rows)) if i not in {*cls, *windows})])
        if method.cls_keep is not None:
            image = image.take(_highest_of_each(image, method.cls_keep))
        if received:
            image.received = torch.stack([received[0], received[-1]], 1)[first:]
        if attention is not None:
            image.tower = torch.cat([states[number] for number in wanted], -1), keys, attention
        return image

    def _tiled(self, pixels: Tensor, size: Tensor, method: Method) -> Image:
        """One image of tiles [tiles, 3, side, side], the last ones perhaps empty; transformers says which row is where.

        The rows of a tile keep their places behind those of the tile before; a newline has -2.
        """
        from transformers.models.llava_next.modeling_llava_next import (
            get_anyres_image_grid_shape,
            image_size_to_num_patches,
        )

        side = self._config.vision_config.image_size
        count = image_size_to_num_patches(size, self._config.image_grid_pinpoints, side)
        whole = replace(method, cls_keep=None)
        tiles = [self.image(tile, whole) for tile in pixels[:count]]
        each = len(tiles[0].rows)
        numbers = torch.arange(count * each).view(count, each, 1)
        model = self._reference.model.model
        order = model.pack_image_features([numbers], size[None], "default", torch.tensor([-1]))[0][0].flatten().tolist()
        placeholders = len(order)
        if method.hiprune is not None:  # its code neither unpads nor adds newlines
            of_grid = numbers.flatten()[each:].view(*get_anyres_image_grid_shape(
                size, self._config.image_grid_pinpoints, side)[:2], math.isqrt(each), math.isqrt(each))  # fmt: skip
            order = [*range(each), *of_grid.permute(0, 2, 1, 3).flatten().tolist()]
        newline = model.image_newline
        rows = torch.stack([newline if i < 0 else tiles[i // each].rows[i % each] for i in order])
        attention = [0.0 if i < 0 else (tiles[i // each].attention or [0.0] * each)[i % each] for i in order]
        image = Image(
            rows, [-2 if i < 0 else i for i in order], [False] * len(order), attention, [None] * len(order),
            torch.stack([tiles[i // each].hidden[i % each] * (i >= 0) for i in order]),
            of_tile=[-1 if i < 0 else i // each for i in order], placeholders=placeholders,
        )  # fmt: skip
        if method.cls_keep is not None:
            image = image.take(_highest_of_each(image, method.cls_keep))
        if method.hiprune is not None:
            known = torch.cat([tile.received for tile in tiles])  # type: ignore[misc]
            image.received = torch.stack([known[i] * (i >= 0) for i in order])
        if method.visionzip is not None:
            columns = get_anyres_image_grid_shape(size, self._config.image_grid_pinpoints, side)[1]
            return self._zipped([tile.tower for tile in tiles], columns, method.visionzip, placeholders)
        return image

    def _zipped(self, towers: list[Any], columns: int, counts: tuple[int, int], placeholders: int) -> Image:
        """VisionZip's tokens of the views of an image."""
        states, keys, attention = (torch.stack(parts) for parts in zip(*towers, strict=True))
        merging = visionzip(keys, attention, columns, *counts)
        rows, count = self._projector(merging.weights @ states.flatten(0, 1)), len(merging.places)
        return Image(rows, merging.places, [False] * count, None, [None] * count, rows, placeholders=placeholders)

    @staticmethod
    def _hipruned(image: Image, keep: int, alpha: float) -> list[int]:
        """The rows of whole views that enter."""
        assert image.received is not None
        tiles, kept = image.of_tile or [0] * len(image.rows), list[int]()
        each = sum(tile == 0 and place >= 0 for tile, place in zip(tiles, image.places, strict=True))
        for tile in range(max(tiles) + 1):
            own = [i for i, of in enumerate(tiles) if of == tile and image.places[i] >= 0]
            kept += [own[i] for i in hiprune(image.received[own], min(keep, each), alpha)]
        return sorted(kept)

    def _selected(self, image: Image, ids: list[int], method: Method, asked: str) -> Image:
        """What of an image enters the decoder by CDPruner, or by DART before layer 1."""
        last = max(i for i, token in enumerate(ids) if token == self._reference.image_token)
        text = [(i > last, token) for i, token in enumerate(ids) if token != self._reference.image_token]
        embedded = self._decoder.embed_tokens(torch.tensor([token for _, token in text]))
        if method.cdpruner is not None:
            count, kind = method.cdpruner
            question = embedded[[i for i, (after, _) in enumerate(text) if after]].mean(0)
            raw = {"none": lambda: None, "tower": lambda: self._by_clip(image.hidden, asked)}.get(
                kind, lambda: torch.cosine_similarity(image.rows.double(), question.double()[None], dim=-1)
            )
            return image.take(cdpruner(image.rows, raw(), count, image.of_tile))
        if method.hiprune is not None:
            return image.take(self._hipruned(image, *method.hiprune[:2]))
        if method.divprune is not None:
            return image.take(divprune(image.rows, method.divprune))
        if method.dart is not None and not method.dart[1]:
            kept = dart_before(image.rows, embedded, *(method.dart[i] for i in (0, 2, 3)))
            return image.take(kept) if image.offsets else replace(image.take(kept), offsets=kept, span=len(image.rows))
        return image

    def _by_clip(self, hidden: Tensor, asked: str) -> Tensor:
        """Minus the cosine of each patch with the question in CLIP's space, mean over the question's segments."""
        assert self._clip is not None
        patches, texts = self._clip.patches(hidden).double(), self._clip.texts(asked).double()
        return -torch.cosine_similarity(patches[:, None], texts[None], dim=-1).mean(1)

    def _feature_layers(self, layers: int) -> list[int]:
        """Numbers of the hidden states that are used; 0 are the embeddings."""
        several = getattr(self._config, "vision_feature_layers", None)  # of VipLLaVA
        named = several or self._config.vision_feature_layer
        return [n % (layers + 1) for n in ([named] if isinstance(named, int) else named)]

    def _class_attention(self, layer: Any, x: Tensor) -> Tensor:
        """Head-mean attention [n] of row 0 over all rows that enter `layer` (MustDrop Eq. 6)."""
        return self._attention(layer, x).mean(0)[0]

    def _attention(self, layer: Any, x: Tensor) -> Tensor:
        """The attention [heads, n, n] in a block of the tower."""
        y, heads = layer.layer_norm1(x), layer.self_attn.num_heads
        q = layer.self_attn.q_proj(y).view(len(y), heads, -1).transpose(0, 1)
        k = layer.self_attn.k_proj(y).view(len(y), heads, -1).transpose(0, 1)
        return torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1)

    # ---- the decoder -------------------------------------------------------------------------------------------------

    def prompt(self, ids: list[int], out: Outcome, method: Method) -> tuple[list[Cache], Tensor]:
        """Run the prompt; returns the caches as decoding finds them and the last hidden row."""
        x, rows = self._enter(ids, out.images)
        keys = self._keys(out.images, method.key)
        maps = [torch.cat(each) for each in zip(*(image.maps for image in out.images), strict=True)]
        caches: list[Cache] = []
        last_prune: list[int] | None = None
        for number, layer in enumerate(self._decoder.layers, start=1):
            if number == method.k:
                x, rows = _select(x, rows, [i for i, row in enumerate(rows) if row.image is None])
            x, attention, cache = self._layer(layer, x, rows, None)
            caches.append(cache)
            there = [row.image for row in rows if row.image is not None]
            if number <= len(maps):
                x[[i for i, row in enumerate(rows) if row.image is not None]] += maps[number - 1][there]
            if not there or number + 1 == method.k:  # where all image rows leave anyway, nobody asks for scores
                continue
            if number in method.layers:
                kept = _dual(out, number, attention, rows, method, keys)
            elif method.fastv is not None and number == method.fastv[0]:
                kept = _fastv(attention, rows, method.fastv[1])
            elif method.dart is not None and number == method.dart[1]:
                kept = _dart(
                    cache.key, self._decoder.norm(x), rows, *(method.dart[i] for i in (0, 2, 3)), method.dart_order
                )
            elif method.pyramiddrop is not None and number in method.pyramiddrop[1]:
                entered = sum(len(image.rows) for image in out.images)
                attention = self._layer(self._decoder.layers[number], x, rows, None)[
                    1
                ]  # of the next layer, before any leave
                kept = _pyramiddrop(attention, rows, entered, method.pyramiddrop, number)
                if len(kept) == len(there):
                    continue
            else:
                continue
            out.kept[number] = kept
            last_prune = kept if method.layers else None
            x, rows = _select(x, rows, [i for i, row in enumerate(rows) if row.image is None or row.image in kept])
            if method.positions == "renumber" and number in (*method.layers, *(method.pyramiddrop or (0, ()))[1]):
                rows = [Row(i, row.image, row.asks) for i, row in enumerate(rows)]
        if last_prune is not None:
            for cache in caches[method.layers[0] - 1 :]:  # output-aware: layers before the first prune stay whole
                cache.keep([i for i, row in enumerate(cache.rows) if row.image is None or row.image in last_prune])
        return caches, x[-1]

    def _enter(self, ids: list[int], images: list[Image]) -> tuple[Tensor, list[Row]]:
        """Rows [n, hidden]; an image's placeholders, as many as it has without any method, stand for its rows."""
        x: list[Tensor] = []
        rows: list[Row] = []
        waiting, number, at, position = iter(images), 0, 0, 0
        while at < len(ids):
            if ids[at] != self._reference.image_token:
                x.append(self._decoder.embed_tokens(torch.tensor([ids[at]])))
                rows.append(Row(position, None))
                at, position = at + 1, position + 1
                continue
            image = next(waiting)
            x.append(image.rows)
            for offset in image.offsets or range(len(image.places)):
                rows.append(Row(position + offset, number))
                number += 1
            position += image.span or len(image.places)
            at += image.placeholders or self._config.image_seq_length
        assert next(waiting, None) is None
        after = max((i for i, row in enumerate(rows) if row.image is not None), default=-1) + 1
        rows[after:] = [Row(row.position, None, True) for row in rows[after:]]
        self.next_position = position
        return torch.cat(x) * self._reference.scale, rows

    def _keys(self, images: list[Image], share: float) -> set[int]:
        """Numbers of the rows that no prune may drop: of each image the share its class token looks at most."""
        found: set[int] = set()
        first = 0
        for image in images:
            if share:
                found |= {first + i for i in _highest_of_each(image, share)}
            first += len(image.rows)
        return found

    def step(self, token: int, position: int, caches: list[Cache], method: Method) -> Tensor:
        """Run one new token; with renumbering each layer takes its cache's length for the position, as released."""
        x = self._decoder.embed_tokens(torch.tensor([token])) * self._reference.scale
        for number, layer in enumerate(self._decoder.layers):
            renumbered = method.positions == "renumber"
            row = Row(len(caches[number].rows) if renumbered else position, None)
            x, _, caches[number] = self._layer(layer, x, [row], caches[number])
        return x[-1]

    def _layer(self, layer: Any, x: Tensor, rows: list[Row], past: Cache | None) -> tuple[Tensor, Tensor, Cache]:
        """One layer over x [n, hidden]: its output, its attention [heads, n, all], and the cache with the new rows."""
        if hasattr(layer, "conv"):
            return self._convolved(layer, x, rows, past)
        if hasattr(layer, "linear_attn"):
            return self._remembered(layer, x, rows, past)
        attend, y = layer.self_attn, layer.input_layernorm(x)
        gated = self._config.model_type in ("qwen3_5", "qwen3_5_moe", "minicpmv4_6")
        q, k, v = (
            proj(y).view(len(y), -1, attend.head_dim * (1 + (gated and proj is attend.q_proj))).transpose(0, 1)
            for proj in (attend.q_proj, attend.k_proj, attend.v_proj)
        )
        gate = torch.ones(1)
        if gated:
            q, gate = q.chunk(2, -1)
            gate = torch.sigmoid(gate.transpose(0, 1).flatten(1))
        if hasattr(attend, "q_norm"):  # of each head, before rotation
            q, k = attend.q_norm(q), attend.k_norm(k)
        each = np.stack(np.broadcast_arrays(*(row.position for row in rows)))
        positions = (
            torch.from_numpy(each).T.reshape(-1, 1, len(rows)) if each.ndim > 1 else torch.from_numpy(each)[None]
        )
        cos, sin = (table[0] for table in self._decoder.rotary_emb(x[None], position_ids=positions))
        turned = cos.shape[-1]  # of a head; the rest does not rotate
        quarter = neighbours_turned if self._config.model_type == "glm_ocr" else half_turned
        q, k = (
            torch.cat((part[..., :turned] * cos + quarter(part[..., :turned]) * sin, part[..., turned:]), -1)
            for part in (q, k)
        )
        before = 0 if past is None else len(past.rows)
        if past is not None:
            k, v, rows = torch.cat([past.key, k], 1), torch.cat([past.value, v], 1), [*past.rows, *rows]
        group = len(q) // len(k)
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * attend.scaling
        seen = torch.arange(k.shape[1])[None] <= torch.arange(len(y))[:, None] + before
        full = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        mixed = (full @ v.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
        added = getattr(layer, "residual_multiplier", 1.0)
        mixed = attend.o_proj(mixed * gate)
        if hasattr(layer, "post_self_attn_layernorm"):  # GLM-OCR's norms behind attention and the MLP
            x = x + layer.post_self_attn_layernorm(mixed)
            x = x + layer.post_mlp_layernorm(layer.mlp(layer.post_attention_layernorm(x)))
            return x, full, Cache(k, v, rows)
        x = x + mixed * added
        return x + layer.mlp(layer.post_attention_layernorm(x)[None])[0] * added, full, Cache(k, v, rows)

    @staticmethod
    def _convolved(layer: Any, x: Tensor, rows: list[Row], past: Cache | None) -> tuple[Tensor, Tensor, Cache]:
        """As `_layer`, of LFM2's layers without attention: a sum over the rows before, those that ran here."""
        conv = layer.conv
        first, gate, last = conv.in_proj(layer.input_layernorm(x)).chunk(3, -1)
        new = first * last
        seen = new if past is None else torch.cat([past.key, new])
        kernel = conv.conv.weight[:, 0].T  # [taps, hidden]
        before, taps = len(seen) - len(new), len(kernel)
        mixed = []
        for at in range(before, len(seen)):
            own = [(seen[at - back], kernel[taps - 1 - back]) for back in range(min(taps, at + 1))]
            mixed.append(torch.stack([column * weight for column, weight in own]).sum(0))
        added = torch.stack(mixed) + (0 if conv.conv.bias is None else conv.conv.bias)
        x = x + conv.out_proj(gate * added)
        x = x + layer.mlp(layer.post_attention_layernorm(x)[None])[0]
        return x, torch.zeros(0), Cache(seen, seen, [*([] if past is None else past.rows), *rows])

    @staticmethod
    def _remembered(layer: Any, x: Tensor, rows: list[Row], past: Cache | None) -> tuple[Tensor, Tensor, Cache]:
        """As `_layer`, of Qwen3.5's layers without attention: the delta rule over the rows that ran here, one by one.

        The cache's key are the rows before the convolution, its value the matrices behind them.
        """
        mix, y = layer.linear_attn, layer.input_layernorm(x)
        new = mix.in_proj_qkv(y)
        seen = new if past is None else torch.cat([past.key, new])
        kernel, first = mix.conv1d.weight[:, 0].T, len(seen) - len(new)  # [taps, channels]
        memory = torch.zeros(mix.num_v_heads, mix.head_k_dim, mix.head_v_dim) if past is None else past.value
        sharing, read = mix.num_v_heads // mix.num_k_heads, []
        for number in range(len(new)):
            at = first + number
            joined = sum(seen[at - back] * kernel[len(kernel) - 1 - back] for back in range(min(len(kernel), at + 1)))
            q, k, v = torch.nn.functional.silu(joined).split([mix.key_dim, mix.key_dim, mix.value_dim])
            q, k = (part.view(mix.num_k_heads, -1).repeat_interleave(sharing, 0) for part in (q, k))
            q, k = (part / torch.sqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
            rate = torch.sigmoid(mix.in_proj_b(y[number]))
            step = torch.nn.functional.softplus(mix.in_proj_a(y[number]) + mix.dt_bias)
            memory = memory * torch.exp(-torch.exp(mix.A_log) * step)[:, None, None]
            change = (v.view(mix.num_v_heads, -1) - torch.einsum("hk,hkv->hv", k, memory)) * rate[:, None]
            memory = memory + torch.einsum("hk,hv->hkv", k, change)
            read.append(torch.einsum("hk,hkv->hv", q, memory) * mix.head_k_dim**-0.5)
        out = torch.stack(read)
        out = out / torch.sqrt((out * out).mean(-1, keepdim=True) + mix.norm.variance_epsilon) * mix.norm.weight
        out = out.flatten(1) * torch.nn.functional.silu(mix.in_proj_z(y))
        x = x + mix.out_proj(out)
        x = x + layer.mlp(layer.post_attention_layernorm(x)[None])[0]
        return x, torch.zeros(0), Cache(seen, memory, [*([] if past is None else past.rows), *rows])

    def logits(self, row: Tensor) -> Tensor:
        out: Tensor = self._head(self._decoder.norm(row)).float()
        return out


def _dual(out: Outcome, number: int, attention: Tensor, rows: list[Row], method: Method, keys: set[int]) -> list[int]:
    """Dual attention (MustDrop Eq. 8 to 10): image rows that stay, by what the rows after the last image give them."""
    mean = attention.mean(0)
    vision = [i for i, row in enumerate(rows) if row.image is not None]
    question = mean[[i for i, row in enumerate(rows) if row.asks]][:, vision]
    total, most = question.sum(0), question.max(0).values
    out.received[number] = total.tolist(), most.tolist()
    kept = []
    for j, i in enumerate(vision):
        image = rows[i].image
        assert image is not None
        drop = total[j] < method.gamma * total.sum() and most[j] < method.alpha
        if image in keys or not drop:
            kept.append(image)
    return kept


def _dart(
    keys: Tensor, normed: Tensor, rows: list[Row], most: int, image_pivots: int, text_pivots: int, order: str
) -> list[int]:
    """DART after a layer: its keys [kv_heads, n, head_dim] and its output behind the final norm say what stays."""
    size = keys.abs().sum((0, 2))
    image = [i for i, row in enumerate(rows) if row.image is not None]
    text = [i for i, row in enumerate(rows) if row.asks]
    first = sorted(image, key=lambda i: -size[i])[:image_pivots]
    kept = set(first)
    pivots = [*first, *sorted(text, key=lambda i: -size[i])[:text_pivots]]
    for pivot in pivots if order == "size" else list(set(pivots)):
        rest = [i for i in image if i not in kept]
        cosine = {i: float(torch.cosine_similarity(normed[i], normed[pivot], dim=0)) for i in rest}
        kept |= set(sorted(rest, key=cosine.__getitem__)[: most // (image_pivots + text_pivots)])
    found = [rows[i].image for i in sorted(kept)]
    return [number for number in found if number is not None]


def _fastv(attention: Tensor, rows: list[Row], drop: float) -> list[int]:
    """FastV: the image rows that the prompt's last row looks at most."""
    vision = [i for i, row in enumerate(rows) if row.image is not None]
    last = attention.mean(0)[-1, vision].tolist()
    kept = highest(last, len(vision) - math.floor(round(drop * len(vision), 9)))
    return [image for j in kept if (image := rows[vision[j]].image) is not None]


def _pyramiddrop(
    attention: Tensor, rows: list[Row], entered: int, method: tuple[float, tuple[int, ...]], layer: int
) -> list[int]:
    """PyramidDrop, the released code: its ratio list is 1, r, r^2, ...; the image starts where its first row is.

    That code knows one image; with several, the rows of all are ranked together.
    """
    ratios = [method[0] ** i for i in range(len(method[1]) + 1)]
    keep = int(entered * ratios[method[1].index(layer) + 1])
    image = [i for i, row in enumerate(rows) if row.image is not None]
    received = attention[:, -1:, :].mean(0)[:, image].mean(0)
    top = sorted(range(len(image)), key=lambda j: -float(received[j]))[:keep]
    found = [rows[image[j]].image for j in sorted(top)]
    return [number for number in found if number is not None]


def _select(x: Tensor, rows: list[Row], which: list[int]) -> tuple[Tensor, list[Row]]:
    return x[which], [rows[i] for i in which]


def _highest_of_each(image: Image, share: float) -> list[int]:
    """Of each tile the share of its rows that its class token looks at most, in rising order."""
    found: list[int] = []
    of_tile = image.of_tile or [0] * len(image.rows)
    for tile in sorted({*of_tile} - {-1}):
        own = [i for i, number in enumerate(of_tile) if number == tile]
        assert image.attention is not None, "this tower has no class token"
        best = highest([image.attention[i] for i in own], share_of(share, len(own)))
        found += [own[i] for i in best]
    return sorted(found)
