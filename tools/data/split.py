"""Items to train on, and held-out items that share no image with them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from PIL import Image

from vtx.runtime.errors import RequestError
from vtx.tools.data.items import Item


def split_items(
    items: Sequence[Item], learn: int, held_out: int, seed: int, *, shuffle: bool
) -> tuple[list[Item], list[Item]]:
    """About `learn` items to train on and `held_out` that share no image with them; each in order.

    If there are fewer items than requested, both shrink in proportion. Raises `RequestError` if one is empty.
    """
    count = min(held_out, round(len(items) * held_out / (learn + held_out)))
    by_image: dict[object, list[int]] = {}
    for number, item in enumerate(items):
        first = item.images[0]
        by_image.setdefault(id(first) if isinstance(first, Image.Image) else first, []).append(number)
    groups = list(by_image.values())
    if shuffle:
        random.Random(seed).shuffle(groups)
    apart = set[int]()
    for group in groups:
        if len(apart) < count:
            apart.update(group)
    kept = [item for number, item in enumerate(items) if number not in apart]
    if not kept or not apart:
        raise RequestError(
            f"{len(items)} items about {len(groups)} images leave {len(kept)} to train on and {len(apart)} to hold "
            "out, and each must be at least 1; give more images"
        )
    return kept, [items[number] for number in sorted(apart)]
