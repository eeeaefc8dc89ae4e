"""Names, shapes and element types of everything that goes into or comes out of a graph.

The exporter declares its graphs from these, the manifest writes them out (`interface.py`), and every backend binds by
them. Layers are numbered from 1, as K is.

    embed    ids [tokens] int64                              -> hidden [tokens, hidden]
    vision   pixel_values [images, 3, height, width] f32     -> image_features [images, tokens, hidden]
    stage    hidden [tokens, hidden], position_ids [1, tokens] int64,
             cos and sin [max_context, head_dim / 2] f32, the slots, and
             past_key.N, past_value.N                        -> hidden_out [tokens, hidden],
                                                                present_key.N, present_value.N
    head     hidden [tokens, hidden]                         -> logits [tokens, vocab] f32; in dialects of GPUs also
                                                                best [tokens] int32, the id of each token's largest
                                                                logit, the first of equal ones; -1 if a logit is not
                                                                a finite number
    gate     hidden [tokens, hidden] of a question           -> odds [2] f32: stay, withdraw

Inputs and outputs for reductions exist only in bundles that were exported for them, those for a rest before every K
whose layer before it has attention over the whole prompt:

    stage    before a cut that scores tokens                 -> query [tokens, heads * head_dim] f32, the last layer's
                                                                queries, rotated and not yet scaled
    score    query [tokens, heads * head_dim] f32 of the tokens that fill the last slots,
             key [1, kv_heads, capacity, head_dim],
             total_slots [1] int32                           -> attention_sum and attention_max [slots] f32: what a
                                                                slot gets, mean over heads, summed and at most over
                                                                tokens
    vision   tau [1] f32, the mean cosine from which a window merges (above 1: none);
             one image at a time; all tokens stay where a
             dialect's sizes do not depend on values         -> image_features [1, tokens, hidden],
                                                                patch_index [tokens] int64 (a token's first patch in
                                                                raster order, the class token CLASS_TOKEN),
                                                                merged [tokens] int64 (WINDOW, PATCH or GONE),
                                                                similarity [tokens] f32 (of a window of nine its mean
                                                                cosine, else 0),
                                                                cls_attention [tokens] f32 (what the class token
                                                                gives to the token, mean over heads, in the last
                                                                block in use), cls_attention_last [tokens] f32 (the
                                                                same in the tower's very last block)
    vision   with a text tower                               -> clip_patches [tokens, width] f32, the tokens in the
                                                                space of the text tower's embeddings
    text_tower   ids [tokens] int64 by a tokenizer of its own -> text_embedding [1, width] f32
    vision   for a block of the tower                        -> received [tokens, 2] f32, the attention that a token
                                                                gets in that block and in the last one in use, mean over
                                                                heads and over all of the tower's tokens
    vision   with a graph of the projector                   -> tower_tokens [images, states, width + head + 1] f32:
                                                                of each of the tower's tokens, its class token first,
                                                                the hidden state that is projected, the mean over heads
                                                                of its keys in the last block in use, and what the class
                                                                token gives to it there, mean over heads
    projector   tower_states [tokens, width] f32             -> hidden [tokens, hidden]

A stage may read more of each token than its hidden state. The manifest declares such inputs under `token_inputs`; the
embed graph, the vision graph or both give them; tokens of a graph that does not have zeros. The session passes them on
with the tokens, whatever they mean:

    embed, vision            -> token_input.NAME [tokens, width] f32
    stage    token_input.NAME [tokens, width] f32, of the names that the stage lists

If the manifest's `two_way` says that tokens see each other both ways, stages read how far each token sees:

    stage    seen_slots [1, tokens] int64, the number of the cache's first slots that a token sees: those up to its own,
             or up to the last token's of those that it sees both ways, a whole prompt or an image

Layers with a convolution keep a state, zeros before the first token: what they convolve of the last tokens, column
after column, and with the gated delta rule its matrices [value heads, key size, value size]. A stage with such layers
has one input and one output for all of them, and gives the states after as many of the run's tokens as are asked for,
of a run of one token after that. Several conversations run with one token each:

    stage    state [layers, conversations, numbers] f32,
             state_ends [ends] int64, numbers of the run's tokens
                                                             -> state_out [layers, conversations, ends, numbers] f32

In a bundle whose model outputs actions, the head is one step of its expert:

    head     robot_state [1, size] f32, actions [horizon, width] f32, time [1, 1] f32,
             position_ids [1 + horizon] int64, cos, sin,
             past_key.N, past_value.N [kv_heads, slots, head_dim] f32, the prompt's,
             of any number of slots in each layer            -> change [horizon, width] f32

Hidden states are float32 at every graph's boundary, whatever it computes in; K and V have the bundle's KV type, but
int8 is for `ort` graphs only, with a scale for each channel; other dialects have float16 instead:

    stage    key_scale.N, value_scale.N [1, kv_heads, 1, head_dim] f32: K and V are the integers times these
    score    key_scale, the same of the layer whose keys it gets

Where layers slide, every stage has rotary tables for them, sliding_cos and sliding_sin, and

    stage    first_slot [1, tokens] int64, the first slot that each token sees in them; those before it are further back
             than the window, by position

The stage of layers that share K and V has no caches and no inputs for slots of its own. It reads those of their
sources once the new tokens are in them: past_key.N, past_value.N and, but in `plain`, last_slot.N [1] int32. Head sizes
may differ between layers that slide and the others.

A stage's inputs for KV slots, and the shape of a cache, differ by dialect:

    ort, ort-cuda
             last_slot [1] int32, the index of the last filled slot, and total_slots [1] int32, the number of filled
             ones, both with the new tokens; caches [1, kv_heads, capacity, head_dim], past and present the same buffer
    plain    nothing; past [1, kv_heads, past, head_dim], present [1, kv_heads, past + tokens, head_dim]
    trt, trt10
             total_slots [1] int32, as above; past [1, slots, kv_heads, head_dim], of which the filled ones are seen;
             present [1, tokens, kv_heads, head_dim], K and V of the new tokens alone. A score's key has past's axes

Several conversations run with one token each in the dialects of onnxruntime and TensorRT: their number is then the
first size of what is 1 here.
"""

from __future__ import annotations

from vtx.runtime.precision import KV_DTYPES

IDS = "ids"
HIDDEN = "hidden"
HIDDEN_OUT = "hidden_out"
PIXELS = "pixel_values"
FEATURES = "image_features"
POSITIONS = "position_ids"
COS = "cos"
SIN = "sin"
SLIDING_COS = "sliding_cos"
SLIDING_SIN = "sliding_sin"
FIRST_SLOT = "first_slot"
LAST_SLOT = "last_slot"
TOTAL_SLOTS = "total_slots"
SEEN_SLOTS = "seen_slots"
SLOTS = {  # inputs of a stage, by dialect
    "ort": (LAST_SLOT, TOTAL_SLOTS),
    "ort-cuda": (LAST_SLOT, TOTAL_SLOTS),
    "plain": (),
    "trt": (TOTAL_SLOTS,),
    "trt10": (TOTAL_SLOTS,),
}
DIALECTS = tuple(SLOTS)
CUDA = "ort-cuda"  # the dialect without sliding windows
UNTYPED = ("ort", "plain")  # dialects of float32, whatever type weights have
IN_PLACE = ("ort", "ort-cuda")  # dialects whose graphs write K and V where they read them
ON_GPU = ("ort-cuda", "trt", "trt10")  # dialects whose head also gives the best token, so that logits may stay there
TENSORRT = ("trt", "trt10")  # dialects whose caches have the axis of slots before that of heads
LOGITS = "logits"
BEST = "best"
ROBOT_STATE = "robot_state"  # of an expert
ACTIONS = "actions"
TIME = "time"
CHANGE = "change"
ODDS = "odds"
QUERY = "query"
KEY = "key"
KEY_SCALE = "key_scale"
ATTENTION_SUM = "attention_sum"
ATTENTION_MAX = "attention_max"
TAU = "tau"
VISION_DEFAULTS = {TAU: 2.0}  # extra inputs of vision graphs, and the value with which each changes nothing
PATCH_INDEX = "patch_index"
MERGED = "merged"
SIMILARITY = "similarity"
CLS_ATTENTION = "cls_attention"
CLS_ATTENTION_LAST = "cls_attention_last"
CLIP_PATCHES = "clip_patches"
TEXT_EMBEDDING = "text_embedding"
RECEIVED = "received"
TOWER_TOKENS = "tower_tokens"
TOWER_STATES = "tower_states"
# Outputs of vision graphs for each token, [tokens] or [tokens, width] float32.
VISION_SIGNALS = (SIMILARITY, CLS_ATTENTION, CLS_ATTENTION_LAST, CLIP_PATCHES, RECEIVED)

CLASS_TOKEN = -1  # the patch index of the tower's class token
GONE = -1  # what `merged` says of a token: gone into a window, one patch, a window of nine
PATCH = 0
WINDOW = 1
ODDS_ORDER = ("stay", "withdraw")
TOKEN_INPUT = "token_input."  # begins the names of token inputs in graphs
# Among the inputs of tokens in a run, [tokens, 1]: those with the same number see each other both ways; -1: with none.
GROUP = "group"
# What a layer keeps of the tokens it has seen: K and V in slots, nothing, or a state of one size.
SLOTTED = "slots"
UNCACHED = "none"
STATEFUL = "state"
CACHE_KINDS = (SLOTTED, UNCACHED, STATEFUL)
STATE = "state"
STATE_ENDS = "state_ends"
STATE_OUT = "state_out"


def token_input(name: str) -> str:
    return TOKEN_INPUT + name


# Names of the tensors of a layer.
past_key = "past_key.{}".format
past_value = "past_value.{}".format
present_key = "present_key.{}".format
present_value = "present_value.{}".format
key_scale = f"{KEY_SCALE}.{{}}".format
value_scale = "value_scale.{}".format
source_slot = f"{LAST_SLOT}.{{}}".format


def kv_type(dialect: str, kept: str) -> str:
    """The numpy type of the caches in a dialect's graphs, if the type of the bundle's K and V is `kept`."""
    return "float16" if KV_DTYPES[kept].scaled and dialect != "ort" else kept
