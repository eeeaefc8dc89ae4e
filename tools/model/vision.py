"""A model's vision tower and the projector behind it, as a family's configuration and a bundle state them."""

from __future__ import annotations

from dataclasses import dataclass

from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.runtime.strict import optional

MERGED = 2  # patches a side of a square that becomes one inside a tower
NECK_SQUARE = 2  # patches a side of a square whose channels are joined behind a tower's neck


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A tower.

    `shuffle`: side, in patches, of a square whose states become one token; zeros pad the right and bottom borders.
    `shuffle_by_columns`: its patches in column order. `pool`: side, in patches, of a square that is averaged before the
    projector. `rms_norm`: norms without a mean and a bias; `qk_norm`: an RMS norm over all heads of the queries
    together, and of the keys. `position_grid`: side of the table of positions if it is resized to the patches.
    `post_norm`: a norm follows the last block.

    `native`: images keep native resolution, positions are rotary, and the projector is the tower's merger; `image`
    is then the side of the largest square image. `gated`: a block's MLP has three matrices instead of two. `window`:
    side, in patches, of the windows that blocks attend within, except `full_blocks`, counted from 0. `maps`: blocks,
    counted from 0, of whose output a merger of its own makes a map; the first is added to the image's tokens after
    decoder layer 1, the second after layer 2, and so on (deepstack). `patch_bias`: patches have a bias. `qkv_bias`:
    all matrices of blocks have one. `head_norms`: an RMS norm over each head of queries and keys. `theta`: the base of
    rotation. `kv_heads`: queries, keys and values have a matrix each, the last two of that many heads. `convolved`:
    blocks, counted from 0, with a gated convolution of `conv_kernel` x `conv_kernel` patches in place of attention.
    `first_norm`: a norm precedes the first block. `half_pixel`: the table is stretched from the middle of a patch to
    that of another, and not from corner to corner. `one_frame`: kernels of patches have no second frame.
    `downsampled`: a convolution makes one state of a square, behind which the merger is a gated MLP.

    `naflex`: images keep native resolution, and the table of positions is stretched to each image's patches,
    bilinear, or with `nearest` each patch has the entry at its place; `image` is then the side of a tile.
    `merged_after`: after that many blocks squares of `MERGED` x `MERGED` patches attend within themselves and become
    one.

    `stage_blocks` and `stage_widths`: the numbers of blocks and of channels of the stages of a convolutional tower,
    which counts as one layer.

    `axis_positions`: a native tower without mergers, with a table of that many positions for rows and one for columns,
    whose tokens are means of squares of `shuffle` x `shuffle` patches. `projected`: a native tower without mergers,
    behind which one matrix makes one of the patches of a square, and a projector follows. `clipped`: the inputs and
    outputs of its matrices are clipped to bounds among the weights; `standardised`: means have a bias and a scale.

    `registers`: tokens between the class token and the patches, without positions; the class token then has none
    either. `beside`: a second tower over the same patches, whose features follow those of this one; it has the pixel
    values of this one times its `pixel_scale` plus its `pixel_shift`, by channel.

    `towers`: those whose features, stretched to one grid, are joined to this tower's states; it counts as one layer and
    has no weights of its own. `neck`: channels after a tower's blocks, of which squares of 2 x 2 become one state.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    image: int
    patch: int
    eps: float
    activation: str
    qkv_bias: bool = optional(True)
    layer_scale: bool = optional(False)
    shuffle: int = optional(1)
    pool: int = optional(1)
    shuffle_by_columns: bool = optional(False)
    rms_norm: bool = optional(False)
    qk_norm: bool = optional(False)
    position_grid: int | None = optional(None)
    native: bool = optional(False)
    gated: bool = optional(False)
    window: int | None = optional(None)
    full_blocks: tuple[int, ...] = optional(())
    maps: tuple[int, ...] = optional(())
    patch_bias: bool = optional(False)
    head_norms: bool = optional(False)
    theta: float = optional(10_000.0)
    kv_heads: int | None = optional(None)
    convolved: tuple[int, ...] = optional(())
    conv_kernel: int = optional(1)
    first_norm: bool = optional(False)
    half_pixel: bool = optional(False)
    one_frame: bool = optional(False)
    downsampled: bool = optional(False)
    post_norm: bool = optional(False)
    stage_blocks: tuple[int, ...] = optional(())
    stage_widths: tuple[int, ...] = optional(())
    naflex: bool = optional(False)
    nearest: bool = optional(False)
    merged_after: int | None = optional(None)
    axis_positions: int | None = optional(None)
    projected: bool = optional(False)
    clipped: bool = optional(False)
    standardised: bool = optional(False)
    registers: int | None = optional(None)
    beside: VisionConfig | None = optional(None)
    pixel_scale: tuple[float, ...] = optional(())
    pixel_shift: tuple[float, ...] = optional(())
    towers: tuple[VisionConfig, ...] = optional(())
    neck: int | None = optional(None)

    @property
    def kind(self) -> str:
        """The kind of tower, a name in `TOWERS`."""
        if self.projected:
            return "pixtral"
        if self.native:
            return "native" if self.axis_positions is None else "axial"
        if self.towers:
            return "joined"
        if self.beside is not None:
            return "paired"
        if self.naflex:
            return "naflex"
        return "convolutional" if self.stage_blocks else "encoder"

    @property
    def several(self) -> bool:
        """True if features of several towers are joined."""
        return self.beside is not None or bool(self.towers)

    @property
    def width(self) -> int:
        """Channels of its features as they leave it."""
        return self.hidden if self.neck is None else NECK_SQUARE**2 * self.neck

    @property
    def grid(self) -> int:
        return self.image // self.patch

    @property
    def square(self) -> int:
        """Side, in patches, of the square that becomes one token."""
        return self.shuffle * (1 if self.merged_after is None else MERGED)

    @property
    def states(self) -> int:
        """Hidden states of the tower's output: its patches, and before them class token and registers."""
        return self.grid**2 + self.class_token + (self.registers or 0)

    @property
    def class_token(self) -> bool:
        """True if a class token comes before the patches."""
        return self.family in ("clip", "internvit", "dinov2")

    @property
    def causal(self) -> bool:
        """False: patches see each other both ways."""
        return False

    @property
    def pre_norm(self) -> bool:
        """True if a norm comes before the first block; the patches then have no bias."""
        return self.family == "clip"

    @property
    def positions(self) -> str:
        """The way in which patches get positions, one of `POSITIONS`, by which images of other sizes can be seen."""
        if self.axis_positions is not None:
            return "axial"
        if self.native:
            return "rotary"
        if self.naflex:
            return "nearest" if self.nearest else "stretched"
        return "table"

    @property
    def batch_axis(self) -> bool:
        """True if the tables of positions and of the class token have an axis for images."""
        return self.family == "internvit"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModel:
    """A tower and its projector.

    `feature_layers` are indices into the tower's hidden states, 0 the embeddings. With `select` "default" the first
    token is left out, with "full" none. `projector_norm_eps` is the epsilon of a norm on the features, None without a
    norm, `projector_rms`: it has no mean and no bias; `projector_layers` is the number of the projector's matrices, and
    `projector_hidden` their width in between, if it is not the decoder's; `projector_widths` the widths between each
    two of them, if they differ.
    """

    vision: VisionConfig
    feature_layers: tuple[int, ...]
    select: str
    projector_activation: str
    projector_bias: bool
    projector_norm_eps: float | None = optional(None)
    projector_layers: int = optional(2)
    projector_hidden: int | None = optional(None)
    projector_widths: tuple[int, ...] = optional(())
    projector_rms: bool = optional(False)

    @property
    def view_tokens(self) -> int:
        """Tokens of one pass of the tower: one a square, or one a hidden state that is not left out."""
        vision = self.vision
        if vision.square > 1:
            return (-(-vision.grid // vision.square)) ** 2
        return (vision.states - self.left_out) // vision.pool**2

    @property
    def left_out(self) -> int:
        """Hidden states of the tower that no token is made of: with `default` the first one, and registers."""
        return 1 + (self.vision.registers or 0) if self.select == "default" else 0

    @property
    def state_width(self) -> int:
        """Numbers of one hidden state's features."""
        second = 0 if self.vision.beside is None else self.vision.beside.hidden
        return self.vision.hidden * len(self.feature_layers) + second

    @property
    def feature_width(self) -> int:
        """Numbers that the projector reads for a token."""
        second = 0 if self.vision.beside is None else self.vision.beside.hidden
        return self.vision.hidden * len(self.feature_layers) * self.vision.shuffle**2 + second

    @property
    def projector_matrices(self) -> list[str]:
        """The canonical names of the projector's matrices, with an activation between them."""
        return [f"projector.linear_{number}" for number in range(1, self.projector_layers + 1)]

    def between(self, out: int) -> int:
        """Numbers between the projector's matrices, the first two if the widths differ; `out` are a token's."""
        if self.projector_widths:
            return self.projector_widths[0]
        if self.projector_hidden is not None:
            return self.projector_hidden
        return self.vision.hidden * self.vision.shuffle**2 if self.vision.native else out

    def facts(self) -> TowerSpec:
        """The facts that a runtime needs of the tower."""
        tower = self.vision
        return TowerSpec(
            layers=tower.layers,
            image=tower.image,
            patch=tower.patch,
            square=tower.square,
            pool=tower.pool,
            tokens=self.view_tokens,
            states=tower.states,
            state_width=self.state_width,
            key_width=tower.hidden // tower.heads,
            class_token=tower.class_token,
            several=tower.several,
            positions=tower.positions,
        )
