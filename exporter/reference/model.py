"""The model and the method in plain PyTorch, one layer in memory at a time.

Bundles are checked against it and calibration measures it: no graph, no cache, no onnxruntime. All requested K share
one pass, since layer K gets its tokens from the pass without withdrawal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vtx.exporter.checkpoint.config import ModelConfig
from vtx.exporter.checkpoint.loader import Checkpoint
from vtx.exporter.checkpoint.text_config import TextConfig
from vtx.exporter.graphs.vision import NEWLINE
from vtx.exporter.reference.feed_forward import LayerWeights
from vtx.exporter.reference.layers import Feed, LayerInputs, decoder_layer, rotate
from vtx.exporter.reference.parts import rms
from vtx.exporter.reference.towers import make_tower
from vtx.exporter.weights.tensors import CheckpointWeights, WeightSource
from vtx.runtime.bundle.safetensors import EVERY
from vtx.runtime.bundle.spec.image_settings import ImageSettings
from vtx.runtime.bundle.spec.model_spec import PARTS
from vtx.runtime.bundle.spec.stored import EMBEDDING, EXPERTS, HEADS
from vtx.runtime.policies.methods.withdraw import Rest, WithdrawToRest
from vtx.runtime.vision.image import ImageSource, load_image
from vtx.runtime.vision.tokens import ImageTokens, Mask, highest
from vtx.tools.model.decoder import PER_LAYER, PER_LAYER_NORM, PER_LAYER_PROJECTION

Attend = Callable[[int, int, Tensor, Tensor], None]
HEAD_ROWS = 4096  # of the output matrix, in memory at a time
FINAL_NORM = "text.norm.weight"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The images of one prompt: `hidden` [image tokens, hidden], and `images` if they have positions of their own.

    `maps`, each like `hidden`, are added to the image tokens after the first layers of the decoder, one after each.
    """

    hidden: Tensor
    images: tuple[ImageTokens, ...] = ()
    maps: tuple[Tensor, ...] = ()

    def first(self, count: int) -> Encoded:
        return self.part(slice(count))

    def part(self, span: slice) -> Encoded:
        """Some image tokens of the only image."""
        indices = np.arange(len(self.hidden))[span]
        maps = tuple(layer_map[span] for layer_map in self.maps)
        return Encoded(self.hidden[span], tuple(image.take(indices) for image in self.images), maps)

    def positions(self, is_vision: Mask) -> NDArray[np.int64]:
        """Positions of a sequence's tokens [n], or [n, 3]: a text token has the next, an image those of its span."""
        if not self.images:
            return np.arange(len(is_vision))
        images = iter(self.images)
        positions = list[list[int]]()
        following = 0
        while len(positions) < len(is_vision):
            if not is_vision[len(positions)]:
                positions.append([following] * PARTS)
                following += 1
                continue
            image = next(images)
            assert image.offsets is not None, "images of one prompt have positions of one kind"
            positions += (following + image.offsets).tolist()
            following += image.positions
        return np.array(positions)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence: `ids` [n], and the `features` of its images.

    The hidden states of the last `last` tokens are returned: 1 for the prompt's end, more with an answer appended.
    """

    ids: NDArray[np.int64]
    features: Encoded
    last: int = 1


@dataclass(frozen=True, slots=True)
class Watchers:
    """Functions that get values of a pass, behind a layer, from 1, and the number of a sample.

    `attend` gets the rotated queries and keys [1, heads, n, head_dim] without withdrawal, `output` the layer's hidden
    states [n, hidden] without it, and `feed` a matrix's name in the layer and its inputs [n, in], those at each K too.
    """

    attend: Attend | None = None
    output: Callable[[int, int, Tensor], None] = lambda *_: None
    feed: Callable[[int, int, str, Tensor], None] | None = None


UNWATCHED = Watchers()


@dataclass(slots=True)
class _Streams:
    """The hidden states of one sample: `full` [n, hidden], and `withdrawn` [Ks so far, text tokens, hidden].

    `layer_inputs` [n, layers, width], of a model that has them. `kept`: K and V of layers that others share, by layer;
    in `left` those of `withdrawn`, one for each K at which tokens have left before the layer.
    """

    full: Tensor
    withdrawn: Tensor
    is_vision: Tensor
    positions: Tensor
    maps: tuple[Tensor, ...]
    groups: Tensor  # [n]: tokens of one number see each other both ways, those of -1 only what is before them
    layer_inputs: Tensor | None = None
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    left: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def text_positions(self) -> Tensor:
        return self.positions[~self.is_vision]

    def resting(self, policy: WithdrawToRest, layer: int, received: Tensor) -> _Streams:
        """Streams of text and the image tokens that stay, those of which most is `received`, to run from `layer` on."""
        count = policy.number_kept(len(received), layer)
        stays = ~self.is_vision
        stays[self.is_vision] = torch.from_numpy(highest(received.numpy(), count))
        maps = tuple(by_layer[stays[self.is_vision]] for by_layer in self.maps)
        inputs = None if self.layer_inputs is None else self.layer_inputs[stays]
        return _Streams(
            self.full[stays],
            self.withdrawn[:0],
            self.is_vision[stays],
            self.positions[stays],
            maps,
            self.groups[stays],
            inputs,
        )

    def run(self, c: TextConfig, layer: int, weights: LayerWeights, **also: Any) -> None:
        """Run `full` through a layer, from 1: `decoder_layer`, and the map that follows it."""
        layer_inputs = None if self.layer_inputs is None else self.layer_inputs[:, layer - 1]
        source = c.source(layer)
        shared = None if source == layer else (self.kept[source][0], self.kept[source][1], None)
        cache = also.pop("cache", None)
        if cache is None and c.shared is not None:
            cache = []
        inputs = LayerInputs(self.positions, layer, cache, self.groups, layer_inputs, shared)
        self.full = decoder_layer(c, self.full[None], inputs, weights, **also)[0]
        if c.shared is not None and cache:
            self.kept[layer] = cache
        if layer <= len(self.maps):
            self.full[self.is_vision] += self.maps[layer - 1]

    def run_withdrawn(self, c: TextConfig, layer: int, weights: LayerWeights, feed: Feed | None = None) -> None:
        """Run `withdrawn` through a layer.

        A layer that shares K and V reads those of all tokens that ran in its source: of the image, too, if it left
        between the two.
        """
        text = ~self.is_vision
        layer_inputs = None if self.layer_inputs is None else self.layer_inputs[text, layer - 1]
        source = c.source(layer)
        cache = list[Tensor]()
        if source == layer:
            new = None if c.shared is None else cache
            inputs = LayerInputs(self.text_positions, layer, new, self.groups[text], layer_inputs)
            self.withdrawn = decoder_layer(c, self.withdrawn, inputs, weights, feed=feed)
            self.left[layer] = cache
            return
        out = []
        for number, hidden in enumerate(self.withdrawn):
            cache_of_source = self.left.get(source)
            has_run = cache_of_source is not None and number < len(cache_of_source[0])
            keys, values = (
                (part[number][None] for part in cache_of_source) if cache_of_source and has_run else self.kept[source]
            )
            shared = keys, values, self.text_positions if has_run else self.positions
            inputs = LayerInputs(self.text_positions, layer, given=layer_inputs, shared=shared)
            out.append(decoder_layer(c, hidden[None], inputs, weights, feed=feed))
        self.withdrawn = torch.cat(out)


def _of_depths(sample: Sample, ks: Sequence[int | None], states: Sequence[Tensor]) -> dict[int | None, Tensor]:
    """The hidden states of a sample's last tokens at each K."""
    return {k: of_k[-sample.last :] for k, of_k in zip(ks, states, strict=True)}


def _bound(function: Callable[..., None] | None, layer: int, number: int) -> Callable[..., None] | None:
    return None if function is None else partial(function, layer, number)


class Reference:
    """A model as a function of images and token ids, in float32; `weights` are the checkpoint's unless given."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, weights: WeightSource | None = None) -> None:
        self._weights = weights or CheckpointWeights(checkpoint)
        self.config = config
        self._see = make_tower(config, self._weights.read)

    def encode(self, images: Sequence[ImageSource], settings: ImageSettings) -> Encoded:
        tokens, maps = self.image_tokens(images, settings)
        if not tokens:
            return Encoded(torch.zeros((0, self.config.text.hidden)))
        renumbered = any(image.offsets is not None for image in tokens)
        hidden_states = torch.from_numpy(np.concatenate([t.hidden for t in tokens]))
        return Encoded(hidden_states, tuple(tokens) if renumbered else (), maps)

    def image_tokens(
        self, images: Sequence[ImageSource], settings: ImageSettings
    ) -> tuple[list[ImageTokens], tuple[Tensor, ...]]:
        """The tokens of each image of a prompt, and the maps of all for the decoder."""
        layout = self.config.layout.for_images(len(images))
        tower = self.config.facts()
        tokens = list[ImageTokens]()
        maps = list[Sequence[Tensor]]()
        hidden = (0, self.config.text.hidden)
        newline = self._weights.read(NEWLINE)[None].cpu().numpy() if layout.newline else np.zeros(hidden, np.float32)
        for source in images:
            image = load_image(source)
            views = layout.views(image, settings)
            if isinstance(views, list):  # of different sizes
                states = [self.features(view[None]).cpu().numpy() for view in views]
            else:
                features, *further = self._see(torch.from_numpy(views))
                maps.append(further)
                states = np.split(features.cpu().numpy(), len(views))
            first = tower.class_first(len(states[0]))
            encoded = [ImageTokens.one_per_patch(view, class_first=first) for view in states]
            key = hashlib.sha256(b"".join(view.tobytes() for view in views)).hexdigest()  # as of `PreparedImage`
            tokens.append(replace(layout.arrange(encoded, *image.size, newline), key=key))
        return tokens, tuple(map(torch.cat, zip(*maps, strict=True)))

    def features(self, pixels: NDArray[np.float32]) -> Tensor:
        """Views [views, 3, height, width] to their tokens [views * tokens of each, hidden]."""
        return self._see(torch.from_numpy(pixels))[0]

    def hidden(
        self,
        samples: Sequence[Sample],
        ks: Sequence[int | None],
        report: Callable[[int], None] = lambda _: None,
        watchers: Watchers = UNWATCHED,
        rest: Rest | None = None,
    ) -> list[dict[int | None, Tensor]]:
        """Last hidden states [last, hidden] of each sample at each K (None: no withdrawal), before the final norm.

        With a `rest`, that many image tokens, or as a float that share of them, stay at each K: those that the prompt's
        last token attends to most in the layer before it. The watcher of attention is then not called.

        Each layer's weights are read once for all samples and all K. `report` gets 1 a layer.
        """
        text = self.config.text
        streams = self.enter(samples)
        depths = sorted(k for k in ks if k is not None)
        rested = [list[_Streams]() for _ in samples]
        received = [Tensor() for _ in samples]

        def rank(layer: int, number: int, queries: Tensor, keys: Tensor) -> None:
            if layer + 1 in depths:
                last = len(samples[number].ids) - samples[number].last
                scores = queries[0, :, last, None] @ keys[0, :, : last + 1].transpose(1, 2) * text.scale(layer)
                received[number] = scores.softmax(-1)[:, 0].mean(0)[streams[number].is_vision[: last + 1]]

        attend = watchers.attend if rest is None else rank
        for layer in range(1, text.layers + 1):
            weights = self.layer_weights(layer, keep=len(samples) > 1)
            for number, stream in enumerate(streams):
                if layer in depths:
                    if rest is None:
                        stream.withdrawn = torch.cat((stream.withdrawn, stream.full[~stream.is_vision][None]))
                    else:
                        rested[number].append(stream.resting(WithdrawToRest(layer, rest), layer, received[number]))
                inputs = _bound(watchers.feed, layer, number)
                stream.run(text, layer, weights, see=_bound(attend, layer, number), feed=inputs)
                watchers.output(layer, number, stream.full)
                if len(stream.withdrawn):
                    stream.run_withdrawn(text, layer, weights, inputs)
                for remaining in rested[number]:
                    remaining.run(text, layer, weights)
            del weights  # before the next layer is read
            report(1)
        return [
            _of_depths(sample, [None, *depths], [stream.full, *stream.withdrawn, *(part.full for part in rests)])
            for sample, stream, rests in zip(samples, streams, rested, strict=True)
        ]

    def keys_values(
        self, sample: Sample, report: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The number from 1 of each layer with attention, its rotated K and its V, without withdrawal.

        K and V are [kv_heads, n, head_dim]. `report` gets 1 a layer.
        """
        (stream,) = self.enter([sample])
        for layer in range(1, self.config.text.layers + 1):
            cache = list[Tensor]()
            weights = self.layer_weights(layer, keep=False)
            stream.run(self.config.text, layer, weights, cache=cache)
            if cache and layer not in self.config.text.conv_layers:
                yield layer, cache[0][0], cache[1][0]
            report(1)

    def prefix_keys_values(
        self,
        sample: Sample,
        ks: Sequence[int | None],
        report: Callable[[int], None] = lambda _: None,
        last: Tensor | None = None,
    ) -> dict[int | None, list[tuple[Tensor, Tensor]]]:
        """By K, each layer's rotated K and V of the tokens that are there, [kv_heads, tokens, head_dim].

        `last` [1, hidden] is one more token behind the sample's, which do not see it.
        """
        (stream,) = self.enter([sample])
        if last is not None:
            stream.full = torch.cat((stream.full, last))
            stream.is_vision = F.pad(stream.is_vision, (0, 1))
            stream.positions = torch.cat((stream.positions, stream.positions[-1:] + 1))
            stream.groups = F.pad(stream.groups, (0, 1), value=-1)
            stream.withdrawn = F.pad(stream.withdrawn, (0, 0, 0, 1))
        depths = sorted(k for k in ks if k is not None)
        results: dict[int | None, list[tuple[Tensor, Tensor]]] = {k: [] for k in ks}
        groups = stream.groups[~stream.is_vision]
        for layer in range(1, self.config.text.layers + 1):
            weights = self.layer_weights(layer, keep=True)
            cache = list[Tensor]()
            withdrawn = list[Tensor]()
            if layer in depths:
                stream.withdrawn = torch.cat((stream.withdrawn, stream.full[~stream.is_vision][None]))
            stream.run(self.config.text, layer, weights, cache=cache)
            if len(stream.withdrawn):
                inputs = LayerInputs(stream.text_positions, cache=withdrawn, groups=groups)
                stream.withdrawn = decoder_layer(self.config.text, stream.withdrawn, inputs, weights)
            for k in ks:
                here = cache if k is None or layer < k else [part[depths.index(k)][None] for part in withdrawn]
                results[k].append((here[0][0], here[1][0]))
            report(1)
        return results

    def greedy(
        self,
        samples: Sequence[Sample],
        end_ids: Collection[int],
        max_new_tokens: int,
        report: Callable[[int], None] = lambda _: None,
    ) -> list[list[int]]:
        """Each sample's greedy answer without withdrawal, up to `max_new_tokens` ids, an end token included.

        Holds every layer's keys and values of all samples, and reads all weights once a token. `report` gets 1 a layer.
        """
        streams = self.enter(samples)
        caches: list[dict[int, list[Tensor]]] = [{} for _ in samples]
        answers: list[list[int]] = [[] for _ in samples]
        active = list(range(len(samples)))
        while active:
            for layer in range(1, self.config.text.layers + 1):
                weights = self.layer_weights(layer, keep=True)
                for n in active:
                    streams[n].run(self.config.text, layer, weights, cache=caches[n].setdefault(layer, []))
                report(1)
            best = self.head(torch.stack([streams[n].full[-1] for n in active])).argmax(-1)
            for n, token in zip(active, best.tolist(), strict=True):
                answers[n].append(token)
            active = [n for n in active if len(answers[n]) < max_new_tokens and answers[n][-1] not in end_ids]
            for n in active:
                ids = np.array(answers[n][-1:])
                following = streams[n].positions[-1:] + 1
                token = self._embedded(ids)
                layer_inputs = self._layer_inputs(token, ids)
                streams[n] = replace(
                    streams[n],
                    full=token,
                    positions=following,
                    maps=(),
                    layer_inputs=layer_inputs,
                    groups=torch.tensor([-1]),
                )
        return answers

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocab]."""
        text = self.config.text
        x = rms(hidden, self._weights.read(FINAL_NORM), text.eps)
        parts = list[Tensor]()
        for name in [name for name in HEADS if self._weights.holds(name)] or [EMBEDDING]:
            for start in range(0, self._weights.rows(name), HEAD_ROWS):
                parts.append(F.linear(x, self._weights.read(name, slice(start, start + HEAD_ROWS))))
        logits = torch.cat(parts, -1)
        return logits if text.softcap is None else text.softcap * torch.tanh(logits / text.softcap)

    def logits(
        self,
        ids: NDArray[np.int64],
        features: Encoded,
        ks: Sequence[int | None],
        report: Callable[[int], None] = lambda _: None,
    ) -> dict[int | None, Tensor]:
        """Logits [vocab] at the last position for each K (None: no withdrawal). `report` gets 1 a layer."""
        hidden = self.hidden([Sample(ids, features)], ks, report)[0]
        return dict(zip(ks, self.head(torch.cat([hidden[k] for k in ks])), strict=True))

    def enter(self, samples: Sequence[Sample]) -> list[_Streams]:
        """The hidden states of each sample as they enter the first layer."""
        streams = []
        for sample in samples:
            is_vision = torch.from_numpy(sample.ids == self.config.image_token_id)
            hidden = self._embedded(np.where(is_vision.numpy(), 0, sample.ids))  # an image's id may be in no table
            hidden[is_vision] = sample.features.hidden
            padded = np.where(is_vision.numpy(), self.config.text.padding_id or 0, sample.ids)
            withdrawn = hidden.new_zeros(0, int((~is_vision).sum()), hidden.shape[1])
            positions = torch.from_numpy(sample.features.positions(is_vision.numpy()))
            groups = torch.full((len(sample.ids),), -1)
            if self.config.text.two_way == "prompt":
                groups[: len(sample.ids) - sample.last + 1] = 0
            if self.config.text.two_way == "images":  # image tokens that follow each other
                first = is_vision & ~F.pad(is_vision, (1, 0))[:-1]
                groups[is_vision] = first.cumsum(0)[is_vision]
            layer_inputs = self._layer_inputs(hidden, padded)
            streams.append(
                _Streams(hidden, withdrawn, is_vision, positions, sample.features.maps, groups, layer_inputs)
            )
        return streams

    def _embedded(self, ids: NDArray[np.int64]) -> Tensor:
        """The hidden states [n, hidden] of text tokens on their way into the decoder."""
        text = self.config.text
        hidden = self._weights.read(EMBEDDING, ids)
        return hidden * text.hidden**0.5 if text.scaled_embedding else hidden

    def weight(self, name: str) -> Tensor:
        return self._weights.read(name)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys [heads, n, head_dim], rotated by their positions [n]."""
        return rotate(self.config.text, x, positions, 1)

    def _layer_inputs(self, hidden: Tensor, ids: NDArray[np.int64]) -> Tensor | None:
        """The inputs of each layer for tokens that enter the decoder, [n, layers, width], by the ids of their table."""
        text = self.config.text
        width = self.config.text.per_layer
        if width is None:
            return None
        projected = F.linear(hidden, self._weights.read(PER_LAYER_PROJECTION)) * text.hidden**-0.5
        projected = rms(
            projected.reshape(len(hidden), text.layers, width), self._weights.read(PER_LAYER_NORM), text.eps
        )
        embedded = self._weights.read(PER_LAYER, ids).reshape(len(ids), text.layers, width) * width**0.5
        inputs: Tensor = (projected + embedded) * 2**-0.5
        return inputs

    def layer_weights(self, layer: int, *, keep: bool) -> LayerWeights:
        """The weights of decoder layer `layer`, from 1, by name: read now if `keep`, else at each use.

        Those of experts are always read at each use.
        """
        prefix = f"text.layers.{layer - 1}."
        names = {n.removeprefix(prefix): n for n, _ in self.config.text.layer_tensors(layer)}
        kept = {name: self._weights.read(full) for name, full in names.items() if keep and EXPERTS not in name}

        def weight(name: str, rows: slice = EVERY) -> Tensor | None:
            if name in kept or name not in names:
                return kept.get(name)
            return self._weights.read(names[name], rows)

        return weight


class LayerErrors:
    """The changes that the weights of `rounded` make in each layer of one sample, whose number is `sample`.

    `watch`, the watcher of the whole weights' outputs, runs the rounded layer on what enters the whole one. `largest`
    is the layer with the largest error, from 1, and that error: of the layer's output, relative to it, the root of the
    mean square over the tokens.
    """

    def __init__(self, whole: Reference, rounded: Reference, samples: Sequence[Sample], sample: int) -> None:
        self._rounded = rounded
        self._sample = sample
        (self._stream,) = whole.enter([samples[sample]])
        self.largest = (1, 0.0)

    def watch(self, layer: int, number: int, output: Tensor) -> None:
        """Compare a layer's `output` [n, hidden] of sample `number`, which enters the next layer."""
        if number != self._sample:
            return
        self._stream.run(self._rounded.config.text, layer, self._rounded.layer_weights(layer, keep=False))
        moved = (self._stream.full - output).norm(dim=-1) / output.norm(dim=-1).clamp_min(1e-30)
        error = float(moved.square().mean().sqrt())
        if error > self.largest[1]:
            self.largest = (layer, error)
        self._stream.full = output
