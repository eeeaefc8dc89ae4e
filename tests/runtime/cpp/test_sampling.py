"""Logits that are not numbers end an answer in either runtime, however its tokens are chosen."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.bundles import copy, export, reseal
from tests.support.cpp import needs_cpp, run, write_pictures
from tests.support.fixtures import Checkpoints
from vtx.runtime.api.load import load
from vtx.runtime.bundle.safetensors import read_header
from vtx.runtime.errors import BundleError
from vtx.runtime.session.sampling import NOT_FINITE

pytestmark = needs_cpp


@pytest.fixture(scope="module")
def damaged(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose head has a row of what is not a number, so that one token's logit is none."""
    place = tmp_path_factory.mktemp("damaged")
    folder = copy(export(tiny_checkpoint(), place / "whole", (2,), "fp32").folder, place / "bundle")
    for file in sorted((folder / "weights").glob("*.safetensors")):
        for name, tensor in read_header(file).tensors.items():
            if re.search(r"(head|output)\.weight$", name):
                row = np.full(tensor.shape[1], np.nan, np.float32)
                with file.open("r+b") as content:
                    content.seek(tensor.offset + 7 * row.nbytes)
                    content.write(row.tobytes())
                reseal(folder, f"weights/{file.name}")
                return folder
    raise AssertionError("this bundle has no head")


@pytest.mark.sampled
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}])
def test_both_runtimes_refuse_them(damaged: Path, tmp_path: Path, settings: dict[str, float]) -> None:
    [picture] = write_pictures(tmp_path, [(60, 60)])
    with (
        load(damaged, device="cpu", threads=1) as model,
        model.open(picture) as conversation,
        pytest.raises(BundleError, match=re.escape(NOT_FINITE)),
    ):
        conversation.ask("red?", **settings)
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    done = run("run", "--bundle", damaged, "--device", "cpu", *words, picture, "red?")
    assert done.returncode == 1
    assert NOT_FINITE in done.stderr.decode()
    assert not done.stdout
