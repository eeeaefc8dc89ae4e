"""The storage of each tensor of a model: the precision of its part, and the scheme of a quantised matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vtx.runtime.errors import RequestError
from vtx.runtime.precision import KV_TYPES, PRECISIONS, STORED

EXPONENTS = ("linear_attn.A_log", "linear_attn.dt_bias")  # of the decays of the gated delta rule
RATES = (
    "linear_attn.in_proj_a.weight",
    "linear_attn.in_proj_b.weight",
)  # one row a head: all that it forgets or learns
ROUTERS = "mlp.gate.weight", "mlp.shared_expert_gate.weight"  # one row an expert: the choice among all
EXPERTS = ".experts."  # in the names of matrices that all experts of a layer have together
EMBEDDING = "text.embed_tokens.weight"
HEAD = "head.weight"
HEADS = "head.first.weight", HEAD, "head.last.weight"  # its rows in order, of heads in rows of several precisions
BLOCK = 64  # of int4, unless another is named; int8 has a scale a row
BLOCKS = (32, 64, 128)  # weights of a row that may share a scale
ZEROED = 32  # at most in a block that has a zero point, too
MIN_BLOCK = 16
SCALE_BITS = 16
WIDER = "int8"  # matrices of an int4 decoder that have more bits
SCALES = ".scales"  # ends of the names of a quantised matrix's scales and zero points
ZEROS = ".zeros"
INT8_ACTIVATIONS = 4  # accuracy_level of MatMulNBits: products of integers, the activations quantised block by block


@dataclass(frozen=True, slots=True)
class Scheme:
    """The storage of a matrix [out, in]: weights as `dtype`, `block` weights of a row to a scale (`in`: all).

    `zero_bits`: those of a zero point of each block, 4 (two to a byte) or 8, or 0 if it has none.
    """

    dtype: str
    block: int
    zero_bits: int = 0

    @property
    def bits(self) -> int:
        return STORED[self.dtype].bits or 8

    @property
    def bits_of_a_weight(self) -> float:
        """Bits, with the share of its block's scale and zero point."""
        return self.bits + (SCALE_BITS + self.zero_bits) / self.block

    @property
    def held(self) -> str:
        """The safetensors dtype of the bytes; numpy knows no narrower type than int8."""
        return "I8" if self.dtype == "I8" else "U8"

    def scales(self, width: int) -> int:
        return width // self.block

    def nbytes(self, width: int) -> int:
        return width * self.bits // 8


def scheme(precision: str, shape: tuple[int, ...], block: int | None = None) -> Scheme | None:
    """The scheme of a matrix [out, in] at a precision, or None if it cannot be quantised.

    `block`: the most weights that share a scale, None for the default; int4 in blocks of up to `ZEROED` has zero
    points, too, of 4 bits where a row's fill whole bytes. A row's width must be a multiple of 16: onnxruntime's kernels
    read whole blocks of a power of two.
    """
    width = shape[-1]
    if width % MIN_BLOCK or not all(shape):
        return None
    row = PRECISIONS[precision]
    if row.bits == 8:
        return Scheme(row.stored, width if block is None else power_of_two_in(width, block))
    wanted = block or BLOCK
    block = power_of_two_in(width, wanted)
    return Scheme(row.stored, block, (8 if width // block % 2 else 4) if wanted <= ZEROED else 0)


def power_of_two_in(width: int, most: int) -> int:
    """The largest power of two up to `most` that divides `width`."""
    return min(most, width & -width)


@dataclass(frozen=True, slots=True)
class Precisions:
    """Precisions of decoder, towers with projections, head, K and V.

    `blocks`: the most weights to a scale, by precision, where it is not the default. `own`: parts whose precision is
    that of a quantised checkpoint, and whose other matrices stay floats. `wider`: matrices that are `WIDER` in a part
    with fewer bits.
    """

    decoder: str
    vision: str
    head: str
    kv: str
    blocks: Mapping[str, int] = field(default_factory=dict, hash=False)
    own: tuple[str, ...] = ()
    wider: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for part, precision in (("", self.decoder), ("vision-", self.vision), ("head-", self.head)):
            if precision not in PRECISIONS:
                raise RequestError(f"--{part}precision {precision!r} is not among {', '.join(PRECISIONS)}")
        if self.kv not in KV_TYPES:
            raise RequestError(f"--kv-precision {self.kv!r} is not among {', '.join(KV_TYPES)}")
        for precision, block in self.blocks.items():
            if block not in BLOCKS:
                raise RequestError(f"--{precision}-block {block} is not among {', '.join(map(str, BLOCKS))}")
            if precision not in (self.decoder, self.vision, self.head):
                raise RequestError(
                    f"--{precision}-block {block} is for {precision} weights; add --precision {precision}, or leave it "
                    "out"
                )

    @classmethod
    def choose(
        cls, decoder: str, vision: str | None, head: str | None, kv: str | None, blocks: Mapping[str, int] | None = None
    ) -> Precisions:
        """The precisions named; a quantised decoder has an int8 tower and head by default."""
        row = PRECISIONS.get(decoder)
        if row is None:
            raise RequestError(f"--precision {decoder!r} is not among {', '.join(PRECISIONS)}")
        return cls(decoder, vision or row.other_parts, head or row.other_parts, kv or row.kv, blocks or {})

    @property
    def kv_dtype(self) -> str:
        return KV_TYPES[self.kv].dtype

    @property
    def head_apart(self) -> bool:
        """True if a head that is the embedding table is stored beside it too; of what `tied_head` returns."""
        return PRECISIONS[self.head].bits is not None and "head" not in self.own

    def of(self, name: str) -> str:
        """The precision of the tensor of canonical `name`: that of its part, unless it is wider."""
        precision: str = WIDER if name in self.wider else getattr(self, part_of(name))
        return precision

    def stored(self, name: str, shape: tuple[int, ...], source: str) -> tuple[str, Scheme | None]:
        """The safetensors dtype of a tensor that a checkpoint holds as `source`, and its scheme if it is quantised.

        In a quantised part, tensors other than matrices, and the embedding table, which is read a row at a time,
        stay in the checkpoint's half precision. Numbers behind an exponential are float32 in all.
        """
        if name.endswith(EXPONENTS):
            return "F32", None
        precision = PRECISIONS[self.of(name)]
        if precision.bits is None:
            return precision.stored, None
        rounded = multiplied(name, shape) and part_of(name) not in self.own
        quantised = scheme(precision.name, shape, self.blocks.get(precision.name)) if rounded else None
        half = source if source in ("F16", "BF16") else "F16"
        return (precision.stored, quantised) if quantised else (half, None)


def part_of(name: str) -> str:
    """The part that the tensor of canonical `name` belongs to, as a field of `Precisions`."""
    part = name.partition(".")[0]
    if part in ("vision", "video", "projector", "clip"):
        return "vision"
    return "head" if part == "head" else "decoder"


def multiplied(name: str, shape: tuple[int, ...]) -> bool:
    """True for matrices that may be integers; tables and convolutions are not."""
    return len(shape) == 2 and "embed" not in name and not name.endswith((*RATES, *ROUTERS))


def tied_head(precisions: Precisions, requested: str | None, shape: tuple[int, ...], source: str) -> Precisions:
    """The precisions of a model whose head is its embedding table, which has `shape` and is `source` in a checkpoint.

    A quantised head is stored beside the table: a token reads the whole head, but one row of the table. A head of
    floats is the table. `requested`: the user's precision of it. Raises RequestError.
    """
    table, _ = precisions.stored(EMBEDDING, shape, source)
    if precisions.stored(HEAD, shape, source)[1] is not None:
        return precisions
    name = STORED[table].name
    if requested is not None and requested != name and PRECISIONS[requested].bits is None:
        raise RequestError(
            f"--head-precision {requested} would store a weight twice: this model's head is its embedding table, "
            f"which stays {name}; name int8 or int4 for a smaller head beside it, or leave the option out"
        )
    return replace(precisions, head=name)
