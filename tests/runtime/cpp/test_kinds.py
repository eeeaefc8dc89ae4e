"""K = card in libvtx: the K, rest and tokens of Python for every form of request, and Python's refusals."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import bundles
from tests.support.cabi import Frames, Loaded
from tests.support.cpp import failure, needs_abi, needs_cpp
from tests.support.exported import Models
from tests.support.families.qwen import QWEN35
from tests.support.kinds import FORMS, depth, write_kinds
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.bundle.card import CHOICE, NUMBER, TEXT, YES_NO
from vtx.runtime.bundle.spec.model_spec import unscored
from vtx.runtime.errors import RequestError

llguidance = pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
pytestmark = [needs_cpp, pytest.mark.dialects("ort", "plain")]
KS = (2, 5, 8)
CARDS = {
    "all": (depth(YES_NO, 2), depth(CHOICE, 5, 0.1), depth(NUMBER, 8), depth(TEXT, 8, 0.4)),
    "closed": (depth(NUMBER, 5, 0.2), depth(YES_NO, 2), depth(CHOICE, None)),
    "text": (depth(TEXT, 5, 0.05), depth(NUMBER, 2)),
}


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    return bundles.copy(models(Tiny(context=512), KS).bundle.folder, tmp_path / "bundle")


def guide_of(form: dict[str, Any]) -> dict[str, bytes]:
    """The two fields of the C interface that hold a form."""
    for kind, value in form.items():
        text = value if kind in ("regex", "grammar") else json.dumps(list(value) if kind == "choices" else value)
        return {"guide_kind": kind.encode(), "guide": text.encode()}
    return {}


@pytest.mark.sampled
@needs_abi
@pytest.mark.parametrize("card", CARDS)
def test_every_form_of_request_has_pythons_k_and_rest(folder: Path, card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTX_LLGUIDANCE", str(Path(llguidance.__file__).parent / "_lib.abi3.so"))
    write_kinds(folder, CARDS[card])
    depths = set[tuple[int | None, int]]()
    with (
        load(folder, threads=1) as model,
        model.open(random_image(4)) as image,
        closing(Loaded(folder, "cpu")) as loaded,
        closing(Frames(loaded, [np.asarray(random_image(4))])) as frames,
    ):
        for form, _ in FORMS:
            wanted = image.ask("red?", "card", max_new_tokens=3, **form)
            found = frames.ask("red?", k=b"card", max_new_tokens=3, **guide_of(form))
            stats = wanted.stats
            assert (found["k"], found["rest"]) == (stats.k, stats.rest), form
            assert found["token_ids"] == list(wanted.token_ids)
            depths.add((stats.k, stats.rest))
    assert len(depths) > 2


def test_a_k_at_which_no_rest_can_be_chosen_is_not_joined_with_one(models: Models, tmp_path: Path) -> None:
    ks = tuple(range(2, QWEN35.layers + 1))
    folder = bundles.copy(models(QWEN35, ks).bundle.folder, tmp_path / "bundle")
    random_image(4).save(tmp_path / "a.png")
    with load(folder, threads=1) as model:
        blind = max(k for k in ks if unscored(model.manifest.model, k - 1))
        scored = next(k for k in ks if k < blind and not unscored(model.manifest.model, k - 1))
        for depths, k in (
            ((depth(TEXT, scored, 0.1),), scored),
            ((depth(TEXT, scored, 0.1), depth(NUMBER, blind)), None),
        ):
            write_kinds(folder, depths)
            with load(folder, threads=1) as fresh, closing(Loaded(folder, "cpu")) as loaded:
                with fresh.open(random_image(4)) as image:
                    wanted = image.ask("red?", "card", max_new_tokens=2)
                assert wanted.stats.k == k
                with closing(Frames(loaded, [np.asarray(random_image(4))])) as frames:
                    assert frames.ask("red?", k=b"card", max_new_tokens=2)["k"] == k


def test_what_python_refuses_is_refused_in_its_words(folder: Path, tmp_path: Path) -> None:
    random_image(4).save(tmp_path / "a.png")
    asked = ("run", "--bundle", folder, tmp_path / "a.png", "red?", "--k", "card")

    def told(**more: Any) -> str:
        with load(folder, threads=1) as model, pytest.raises(RequestError) as refused:
            model.ask("red?", "card", **more)
        return str(refused.value)

    assert told() in failure(*asked)
    write_kinds(folder, ())
    assert told() in failure(*asked)
    write_kinds(folder, CARDS["all"])
    assert told(rest="10%") in failure(*asked, "--rest", "10%")
