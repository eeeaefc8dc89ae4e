"""The size of a tower that sees images at their own resolution: what it costs depends on the image's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vtx.runtime.bundle.spec.model_spec import TowerSpec
from vtx.tools.estimate.flops import VisionSize

MOMENTS = 2  # of a video that a patch's kernel covers; for stills the graph adds both up


@dataclass(frozen=True, slots=True)
class NativeSize(VisionSize):
    """A tower with rotary positions, windows of up to `window` patches in all but `whole` layers, and a merger.

    `gated`: three matrices in place of two between the attentions, and norms without biases. `patches`, `view_tokens`
    and `image_tokens` are those of the largest image; `of` gives others.
    """

    gated: bool = False
    window: int = 1
    whole: int = 1

    def of(self, tokens: int) -> NativeSize:
        """The tower for an image of so many tokens."""
        tokens = max(1, min(tokens, self.image_tokens))
        return replace(self, patches=self.features * tokens, view_tokens=tokens, image_tokens=tokens)

    @property
    def tower_tokens(self) -> int:
        return self.patches

    def layer_macs_on(self, tokens: int) -> int:
        """One layer of the tower for that number of patches: the mean of those with windows and those without."""
        h = self.hidden
        seen = (self.whole * tokens + (self.layers - self.whole) * min(tokens, self.window)) // self.layers
        return tokens * (4 * h * h + (2 + self.gated) * h * self.ffn) + 2 * tokens * seen * h

    @property
    def wide(self) -> int:
        """Numbers between the merger's matrices."""
        return self.features * self.hidden

    @property
    def projector_token_macs(self) -> int:
        return self.wide * (self.wide + self.out)

    @property
    def parameters(self) -> int:
        """Weights of the tower and of its merger."""
        h, norm = self.hidden, self.hidden * (1 if self.gated else 2)
        matrices = 4 * h * h + (2 + self.gated) * h * self.ffn
        layer = matrices + 4 * h + (1 + self.gated) * self.ffn + h + 2 * norm
        merger = norm + self.wide * (self.wide + self.out) + self.wide + self.out
        return self.layers * layer + MOMENTS * h * 3 * self.patch**2 + merger


def native_size(tower: TowerSpec, out: int, image_tokens: int) -> NativeSize:
    """The size of a tower that a manifest declares."""
    gated = "gated" in tower.flags
    return NativeSize(
        layers=tower.layers, used=tower.layers, hidden=tower.hidden, ffn=tower.intermediate,
        patches=tower.shuffle**2 * image_tokens, patch=tower.patch, class_token=False, features=tower.shuffle**2,
        view_tokens=image_tokens, image_tokens=image_tokens, out=out, gated=gated,
        window=1 if tower.window is None else tower.window**2,
        whole=tower.layers if tower.window is None else max(1, len(tower.full_blocks)),
    )  # fmt: skip


def seeing(vision: VisionSize | None, tokens: int) -> VisionSize | None:
    """The tower as it sees an image of so many tokens; others see every image alike."""
    return vision.of(tokens) if isinstance(vision, NativeSize) else vision
