"""Optimisation profiles: the sizes that an engine is built for, by the names of its graph's free sizes.

embed    one profile: any number of tokens
stage    up to 1,024 tokens at once; longer prompts run in parts, which bounds the engine's working memory, but prompts
         whose tokens all see each other run whole. Two profiles are decode, one token of each of some conversations,
         with kernels of its own, and prefill, two tokens and more of one. With the gated delta rule up to 128 at once,
         which are one chunk. States after as many tokens as a cache ever holds of one run
vision   one image; of a model that outputs actions, those of all its cameras; of one that sees images of any size, any
         sides up to those of an image of the most pixels that is twice as wide as high, or as high as wide, and of one
         that sees videos too, a pair of frames; of one with tiles or slices of any shape, up to the sides of a view
         that is four times as wide as high; of one that limits the longest edge, a square of that
head     a few tokens: only the last one is sampled; one step of an expert, over any prompt in each layer
gate     the tokens of a question
text_tower   a question in the tower's own ids
score    up to 256 tokens over a cache
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from vtx.runtime.backends.engines import WIDEST, WIDEST_VIEW
from vtx.runtime.backends.slots import HeldStates
from vtx.runtime.bundle.fingerprint import Profile, Range
from vtx.runtime.bundle.spec import graphs as graph_sizes
from vtx.runtime.bundle.spec.manifest import Manifest
from vtx.runtime.errors import BundleError
from vtx.tools.tensorrt.graph import SeenGraph

TOKENS = "tokens"
IMAGES = "images"
CAPACITY = "capacity"
MAX_CONTEXT = "max_context"
HEIGHT = graph_sizes.HEIGHT
WIDTH = graph_sizes.WIDTH
SLOTS = "slots"  # of a cache
PREFILL_TOKENS = 1024
HEAD_TOKENS = 16
SCORE_TOKENS = 256
LIKELY_CAMERAS = 2  # of a bundle that names none
ONE: Range = (1, 1, 1)
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def stage_profiles(m: Manifest, decoding: int | None) -> tuple[Profile, ...]:
    """One profile for prefill and one for single tokens of `decoding` conversations; if that is None one for both.

    The likely prompt is an image and a question.
    """
    slots = m.max_context
    model = m.model
    most = PREFILL_TOKENS if model.delta is None else graph_sizes.DELTA_RUN
    longest = slots if model.two_way == "prompt" else min(most, slots)
    usual = _usual_tokens(m) + 64
    filled = min(slots - 1, usual)
    likely = min(longest, usual)
    sources = model.sources(model.shared or 1, model.layers)  # whose slots a later stage reads
    table: dict[str, Range] = {MAX_CONTEXT: (slots,) * 3}
    table |= {f"{SLOTS}.{source}": (1, filled, slots) for source in sources}
    if model.conv_layers:
        table[graph_sizes.ENDS] = (1, 1, HeldStates(model).ends)
    if decoding is None:
        return (_run_sizes(table, ONE, (1, likely, longest), (0, 0, slots)),)
    return (
        _run_sizes(table, (1, 1, decoding), ONE, (0, filled, slots)),
        _run_sizes(table, ONE, (2, likely, longest), (0, 0, slots)),
    )


def _run_sizes(table: Profile, batch: Range, each: Range, slots: Range) -> Profile:
    """The profile of runs of conversations and of tokens of each, of which one is 1."""
    tokens = each if batch == ONE else batch
    conversations = dict.fromkeys((graph_sizes.BATCH, graph_sizes.CONVERSATIONS), batch)
    return {**table, **conversations, TOKENS: tokens, graph_sizes.EACH: each, SLOTS: slots}


def graph_profiles(m: Manifest, dialect: str, graph: str, decoding: int | None) -> tuple[Profile, ...]:
    """The profiles of one of the dialect's graphs, by its file name; `decoding` as for stages."""
    graphs = m.dialects[dialect]
    if graph in graphs.stages:
        return stage_profiles(m, decoding)
    tokens: Range = (1, min(64, m.max_context), m.max_context)
    images: Range = (1, 1, 1)
    if m.action is not None:
        count = len(m.action.cameras) or max(1, min(LIKELY_CAMERAS, m.max_context // m.layout.max_tokens))
        images = (1, count, max(count, m.max_context // m.layout.max_tokens))
        if graph == graphs.head:
            text = min(64, m.max_context)
            filled = min(m.max_context, count * m.layout.max_tokens + text)
            cut = m.variants[0] if m.variants else m.model.layers + 1
            likely = {f"slots.{layer}": filled if layer < cut else text for layer in range(1, m.model.layers + 1)}
            return ({MAX_CONTEXT: (m.max_context,) * 3, **{s: (1, n, m.max_context) for s, n in likely.items()}},)
    if graph == graphs.vision and m.image.own_size:
        return (_own_size(m),)
    if graph == graphs.head:
        tokens = (1, 1, min(HEAD_TOKENS, m.max_context))
    if graph == graphs.text_tower and m.text_tower is not None:
        tokens = (1, min(16, m.text_tower.max_tokens), m.text_tower.max_tokens)
    if graph == graphs.score:
        most = min(SCORE_TOKENS, m.max_context)
        slots: Range = (1, min(m.max_context, m.layout.max_tokens + 64), m.max_context)
        return ({TOKENS: (1, most, most), CAPACITY: slots},)
    return ({IMAGES: images, TOKENS: tokens},)


def _usual_tokens(m: Manifest) -> int:
    """The most tokens of an image whose request asks for no other number."""
    return int(m.layout.parameters["tokens"]) if m.layout.name == "budget" else m.layout.max_tokens


def _own_size(m: Manifest) -> Profile:
    unit = m.model.tower.patch * m.model.tower.square
    sizes = m.layout.parameters
    if "max_pixels" in sizes:
        most = int(sizes["max_pixels"])
    else:
        most = int(sizes["side"]) ** 2 if "side" in sizes else m.layout.max_tokens * unit**2
    widest = WIDEST if m.layout.name in ("native", "budget") else WIDEST_VIEW
    usual = _usual_tokens(m) * unit**2 if m.layout.name == "budget" else most
    likely, longest = (max(1, math.floor(math.sqrt(area) / unit)) * unit for area in (usual, widest * most))
    if "longest" in sizes:  # the edge of a square, beyond which no image goes
        step = int(sizes["step"])
        longest = -(-int(sizes["longest"]) // step) * step
    sides: Range = (unit, likely, max(longest, int(sizes.get("tile", 0))))
    return {IMAGES: (1, 1, 1 if m.video is None else 2), HEIGHT: sides, WIDTH: sides}


def input_shapes(graph: SeenGraph, profile: Profile) -> Shapes:
    """The smallest, likely and largest shape of every input with a free size. Raises BundleError."""
    shapes = {}
    for name in graph.inputs:
        dims = graph.shapes.get(name, ())
        if all(isinstance(dim, int) for dim in dims):
            continue
        unknown = [dim for dim in dims if not isinstance(dim, int) and dim not in profile]
        if unknown:
            raise BundleError(
                f"{graph.name}: size {unknown[0]!r} of {name} is in no profile ({', '.join(profile)}); "
                "export the bundle again"
            )
        low, likely, high = (
            tuple(dim if isinstance(dim, int) else profile[str(dim)][bound] for dim in dims) for bound in range(3)
        )
        shapes[name] = (low, likely, high)
    return shapes
