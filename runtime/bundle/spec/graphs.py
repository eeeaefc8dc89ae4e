"""The inputs and outputs of each graph of a bundle: names, dtypes and shapes, derived from the manifest.

The manifest file writes this down for other runtimes (`interface.py`); backends compare the graphs they load with it.
A size that is a string is free. Names with `{layer}` are for each layer of a stage, counted from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vtx.runtime.bundle.spec import names
from vtx.runtime.bundle.spec.action_spec import ActionSpec
from vtx.runtime.bundle.spec.manifest import PAIRS, Manifest, StageSpec, TokenInput
from vtx.runtime.precision import KV_DTYPES

LAYER = "{layer}"
TOKENS = "tokens"
IMAGES = "images"
HEIGHT = "height"
WIDTH = "width"
STATES = "states"  # tokens within the tower
BATCH = "batch"  # conversations of a run of a stage
CONVERSATIONS = "conversations"  # the same, of states
EACH = "each"  # tokens of each of them
ENDS = "ends"  # tokens of a run after which states are given out
DELTA_RUN = 128  # tokens of a run at most, with the gated delta rule in TensorRT's dialects; a power of two
# Of past and present.
CACHE_SLOTS = {
    **dict.fromkeys(names.IN_PLACE, ("capacity", "capacity")),
    "plain": ("past", "past + tokens"),
    **dict.fromkeys(names.TENSORRT, ("slots", TOKENS)),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output: numpy's name of its type, and its sizes."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class GraphIO:
    """The inputs and outputs of one graph, by name."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


def embed(m: Manifest) -> GraphIO:
    of_text = [declared for declared in m.token_inputs if declared.of_text]
    return GraphIO({names.IDS: Tensor("int64", (TOKENS,))}, {names.HIDDEN: hidden(m), **_token_inputs(of_text)})


def head(m: Manifest, dialect: str) -> GraphIO:
    if m.action is not None:
        return _expert(m, m.action)
    outputs = {names.LOGITS: Tensor("float32", (TOKENS, m.model.vocab))}
    if dialect in names.ON_GPU:
        outputs[names.BEST] = Tensor("int32", (TOKENS,))
    return GraphIO({names.HIDDEN: hidden(m)}, outputs)


def _expert(m: Manifest, a: ActionSpec) -> GraphIO:
    table = Tensor("float32", ("max_context", m.model.head_dim // 2))
    change = Tensor("float32", (a.horizon, a.width))
    inputs = {
        names.ACTIONS: change,
        names.TIME: Tensor("float32", (1, 1)),
        names.POSITIONS: Tensor("int64", (a.rows,)),
        names.COS: table,
        names.SIN: table,
    }
    if a.state_in == "expert":
        inputs[names.ROBOT_STATE] = Tensor("float32", (1, a.state))
    for layer in range(1, m.model.layers + 1):
        kv = Tensor("float32", (m.model.kv_heads, f"slots.{layer}", m.model.head_dim))
        inputs |= {names.past_key(layer): kv, names.past_value(layer): kv}
    return GraphIO(inputs, {names.CHANGE: change})


def gate(m: Manifest) -> GraphIO:
    return GraphIO({names.HIDDEN: hidden(m)}, {names.ODDS: Tensor("float32", (2,))})


def vision(m: Manifest, dialect: str) -> GraphIO:
    graphs = m.dialects[dialect]
    merges = graphs.vision_merges
    free_size = m.image.own_size
    images, count = (1, TOKENS) if merges or free_size else (IMAGES, m.model.tower.tokens)
    outputs = {names.FEATURES: Tensor("float32", (images, count, m.model.hidden))}
    height, width = (HEIGHT, WIDTH) if free_size else m.image.size
    pictures = IMAGES if m.video is not None and m.video.layout.name == PAIRS else images
    inputs = {names.PIXELS: Tensor("float32", (pictures, 3, height, width))}
    if merges:
        inputs[names.TAU] = Tensor("float32", (1,))
        outputs |= {name: Tensor("int64", (TOKENS,)) for name in (names.PATCH_INDEX, names.MERGED)}
        outputs[names.SIMILARITY] = Tensor("float32", (TOKENS,))
    if graphs.vision_attention:
        outputs[names.CLS_ATTENTION] = Tensor("float32", (TOKENS,))
    if graphs.vision_last_attention:
        outputs[names.CLS_ATTENTION_LAST] = Tensor("float32", (TOKENS,))
    if m.text_tower is not None:
        outputs[names.CLIP_PATCHES] = Tensor("float32", (TOKENS, m.text_tower.width))
    if graphs.vision_received is not None:
        outputs[names.RECEIVED] = Tensor("float32", (TOKENS, 2))
    if graphs.projector is not None:
        tower = m.model.tower
        width = tower.state_width + tower.key_width + 1
        outputs[names.TOWER_TOKENS] = Tensor("float32", (images, STATES, width))
    outputs |= _token_inputs([declared for declared in m.token_inputs if declared.of_images])
    return GraphIO(inputs, outputs)


def projector(m: Manifest) -> GraphIO:
    """The projector alone, if the bundle has its graph."""
    states = Tensor("float32", (TOKENS, m.model.tower.state_width))
    return GraphIO({names.TOWER_STATES: states}, {names.HIDDEN: hidden(m)})


def video(m: Manifest) -> GraphIO:
    assert m.video is not None, "only a bundle for videos has their graph"
    image = m.video.image
    tokens = m.video.layout.parameters["tokens"]
    inputs = {names.PIXELS: Tensor("float32", (IMAGES, 3, *image.size))}
    return GraphIO(inputs, {names.FEATURES: Tensor("float32", (IMAGES, tokens, m.model.hidden))})


def text_tower(m: Manifest) -> GraphIO:
    assert m.text_tower is not None, "only a bundle with a text tower has its graph"
    width = m.text_tower.width
    return GraphIO({names.IDS: Tensor("int64", (TOKENS,))}, {names.TEXT_EMBEDDING: Tensor("float32", (1, width))})


def stage(
    m: Manifest, dialect: str, *, query: bool, reads: Sequence[str] = (), stateful: int | str | None = None
) -> GraphIO:
    """A stage that reads these token inputs, with that number of layers with a state, None without any.

    Names of what each layer has contain `{layer}`.
    """
    past, present = CACHE_SLOTS[dialect]
    table, sliding_table = (
        Tensor("float32", (m.max_context if dialect in names.TENSORRT else "max_context", width // 2))
        for width in (m.model.head_dim, m.model.sliding.head_dim if m.model.sliding is not None else 0)
    )
    inputs = {
        names.HIDDEN: hidden(m),
        names.POSITIONS: Tensor("int64", (1, TOKENS)),
        names.COS: table,
        names.SIN: table,
    }
    if m.model.two_way is not None:
        inputs[names.SEEN_SLOTS] = Tensor("int64", (1, TOKENS))
    if m.model.sliding is not None:
        inputs |= {names.SLIDING_COS: sliding_table, names.SLIDING_SIN: sliding_table}
        inputs[names.FIRST_SLOT] = Tensor("int64", (1, TOKENS))
    inputs |= _token_inputs([declared for declared in m.token_inputs if declared.name in reads])
    inputs |= {name: Tensor("int32", (1,)) for name in names.SLOTS[dialect]}
    inputs |= {name(LAYER): cache(m, dialect, past) for name in (names.past_key, names.past_value)}
    if KV_DTYPES[cache(m, dialect, past).dtype].scaled:
        inputs |= {name(LAYER): _scale(m) for name in (names.key_scale, names.value_scale)}
    outputs = {names.HIDDEN_OUT: hidden(m)}
    outputs |= {name(LAYER): cache(m, dialect, present) for name in (names.present_key, names.present_value)}
    if stateful is not None:
        inputs[names.STATE] = Tensor("float32", (stateful, CONVERSATIONS, m.model.state_numbers))
        inputs[names.STATE_ENDS] = Tensor("int64", (ENDS,))
        outputs[names.STATE_OUT] = Tensor("float32", (stateful, CONVERSATIONS, ENDS, m.model.state_numbers))
    if query:
        outputs[names.QUERY] = _query(m)
    return GraphIO(inputs, outputs)


def stage_of(m: Manifest, spec: StageSpec, dialect: str) -> GraphIO:
    """A stage of a bundle, with the names of its own layers; of one without caches, those of its layers' sources."""
    io = stage(m, dialect, query=spec.query, reads=spec.inputs, stateful=len(spec.stateful) or None)
    sources = m.model.sources(spec.first, spec.last)
    inputs, outputs = (
        {
            name.replace(LAYER, str(layer)): tensor if layer is None else _of_layer(m, tensor, layer)
            for name, tensor in tensors.items()
            for layer in ((spec.cached or sources) if LAYER in name else (None,))
        }
        for tensors in (io.inputs, io.outputs if spec.keeps else {names.HIDDEN_OUT: hidden(m)})
    )
    if not spec.keeps:
        for name in names.SLOTS[dialect]:
            inputs |= dict.fromkeys(map(names.source_slot, sources), inputs.pop(name))
        if dialect not in names.IN_PLACE:
            for source in sources:
                for input_name in (names.past_key(source), names.past_value(source)):
                    inputs[input_name] = _of_layer(m, cache(m, dialect, f"slots.{source}"), source)
    return GraphIO(inputs, outputs)


def _of_layer(m: Manifest, tensor: Tensor, layer: int) -> Tensor:
    """A cache, or scales, with the head size of a layer."""
    return Tensor(tensor.dtype, (*tensor.shape[:-1], m.model.heads_of(layer)))


def score(m: Manifest, dialect: str) -> GraphIO:
    inputs = {
        names.QUERY: _query(m),
        names.KEY: cache(m, dialect, "capacity"),
        names.TOTAL_SLOTS: Tensor("int32", (1,)),
    }
    if KV_DTYPES[inputs[names.KEY].dtype].scaled:
        inputs[names.KEY_SCALE] = _scale(m)
    outputs = (names.ATTENTION_SUM, names.ATTENTION_MAX)
    return GraphIO(inputs, {name: Tensor("float32", ("slots",)) for name in outputs})


def hidden(m: Manifest) -> Tensor:
    return Tensor("float32", (TOKENS, m.model.hidden))


def cache(m: Manifest, dialect: str, slots: str) -> Tensor:
    """K or V of a layer; of a model with layers of several head sizes these are free."""
    heads = m.model.kv_heads
    sizes = (slots, heads) if dialect in names.TENSORRT else (heads, slots)
    return Tensor(names.kv_type(dialect, m.kv_dtype), (1, *sizes, _head_size(m)))


def _token_inputs(declared: Sequence[TokenInput]) -> dict[str, Tensor]:
    return {
        names.token_input(token_input.name): Tensor("float32", (TOKENS, token_input.width)) for token_input in declared
    }


def _query(m: Manifest) -> Tensor:
    return Tensor("float32", (TOKENS, m.model.heads * m.model.head_dim))


def _scale(m: Manifest) -> Tensor:
    return Tensor("float32", (1, m.model.kv_heads, 1, _head_size(m)))


def _head_size(m: Manifest) -> int | str:
    sliding = m.model.sliding
    return m.model.head_dim if sliding is None or sliding.head_dim == m.model.head_dim else "head_dim"
