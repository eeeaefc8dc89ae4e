"""A disk that cannot be read under a bundle or a picture: one line that names the file, and no answer."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.bundles import export
from tests.support.exported import THREADS
from tests.support.faults import Disk, failing
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image
from vtx.runtime.api.load import load
from vtx.runtime.errors import BundleError, ImageError
from vtx.runtime.report.golden import check_golden
from vtx.runtime.vision.image import load_image


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(), tmp_path_factory.mktemp("faults") / "bundle", (3,)).folder


def use(folder: Path, disk: Disk) -> bool:
    """Load the bundle and compare its golden vectors: every read of vtx itself."""
    with failing(disk), load(folder, device="cpu", threads=THREADS) as model:
        return all(check.passed for check in check_golden(model))


@pytest.mark.sampled
@pytest.mark.parametrize("once", [False, True], ids=["for good", "once"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_a_bundle_that_cannot_be_read_gives_no_answer(folder: Path, share: float, once: bool) -> None:
    whole = Disk(str(folder))
    assert use(folder, whole)
    first = 1 + round(share * (whole.counts["read"] - 1))
    with pytest.raises(BundleError, match=r"^[\w./-]+ cannot be read \(Input/output error\); check the disk$"):
        use(folder, Disk(str(folder), "read", first, errno.EIO, once=once))


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    random_image(1).save(tmp_path / "a.png")
    disk = Disk(str(tmp_path), "read", 1, errno.EIO)
    with (
        failing(disk),
        pytest.raises(ImageError, match=r"a\.png' cannot be read \(Input/output error\); check the disk"),
    ):
        load_image(tmp_path / "a.png")
