"""`vtx.export` takes what Python programs have, and says at once what it does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vtx
from tests.support.fixtures import Checkpoints
from vtx.runtime.errors import RequestError


@pytest.mark.slow
def test_paths_and_numbers_of_numpy_are_taken(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    numbers: Any = {"k": [np.int64(3)], "max_context": np.int32(128), "reduce": None}
    made = vtx.export(tiny_checkpoint(), tmp_path / "b", precision="fp32", **numbers)
    assert (made.manifest.variants, made.manifest.max_context) == ((3,), 128)
    assert made.manifest.record["options"]["model"] == str(tiny_checkpoint())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": "16"}, "k is '16'; give a whole number"),
        ({"k": [3, None]}, "k is None; give a whole number"),
        ({"k": 3.0}, r"k is 3\.0; give a whole number"),
        ({"k": True}, "k is True; give a whole number"),
        ({"reduce": ["lsm", 3]}, "reduce is 3; it must be a string"),
        ({"max_context": 128.0}, r"max_context is 128\.0; it must be a whole number"),
    ],
)
def test_values_of_another_kind_are_refused_before_the_work(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        vtx.export(tmp_path / "no checkpoint", tmp_path / "b", **wrong)
