"""Items held out from those that are learnt from."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtx.runtime.errors import RequestError
from vtx.tools.data.items import Item, split_items


def test_items_held_out_share_no_image_with_the_others() -> None:
    shared = [Item((Path(f"{n // 3}.png"),), f"{n}?") for n in range(30)]
    learn, apart = split_items(shared, 20, 10, 0, shuffle=True)
    assert sorted(int(item.question[:-1]) for item in (*learn, *apart)) == list(range(30))
    assert not {item.images for item in learn} & {item.images for item in apart}
    assert 10 <= len(apart) <= 12
    with pytest.raises(RequestError, match="about 1 images leave 0 to train on"):
        split_items(shared[:3], 2, 1, 0, shuffle=True)
