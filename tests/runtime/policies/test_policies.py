"""Specs of reductions and back, what they need of a bundle, and which rows each keeps."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.exported import THREADS, Checkpoints
from tests.support.tiny import random_image
from vtx import cli
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.errors import RequestError
from vtx.runtime.policies import Boundary, Needs, PromptText, parse, registry, to_spec
from vtx.runtime.policies import spec as specs
from vtx.runtime.policies.make import check_depth
from vtx.runtime.policies.methods.cdpruner import CDPruner, greedy, scaled
from vtx.runtime.policies.methods.cls import Cls
from vtx.runtime.policies.methods.dart import Dart
from vtx.runtime.policies.methods.fastv import FastV
from vtx.runtime.policies.methods.full import Full
from vtx.runtime.policies.methods.gate import Gate
from vtx.runtime.policies.methods.lsm import Lsm
from vtx.runtime.policies.methods.mustdrop import MustDrop
from vtx.runtime.policies.methods.withdraw import Withdraw
from vtx.runtime.policies.policy import Policy
from vtx.runtime.vision.tokens import ImageTokens, Patches, highest, keys, share

ROOT = Path(__file__).parents[3]
Floats = NDArray[np.float32]


def attention(values: list[float]) -> dict[str, Floats]:
    return {"cls_attention": np.array(values, np.float32)}


def boundary(total: list[float], most: list[float] | None = None, layer: int = 3, keys: Any = None) -> Boundary:
    """A boundary where the rows still there get this attention; `keys` is what the class token gives them."""
    count = len(total)
    image = Patches(np.arange(count), np.zeros(count, bool), {} if keys is None else attention(keys))
    scores = np.array(total, np.float32), np.array(total if most is None else most, np.float32)
    return Boundary(layer, np.zeros((1, 4), np.float32), (image,), np.ones(count, bool), lambda _: scores)


# --- specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("none", ()),
        ("fastv", (FastV(),)),
        ("fastv:k=3,ratio=0.75", (FastV(3, 0.75),)),
        ("lsm:tau=0.9,order=merged-first", (Lsm(0.9, "merged-first"),)),
        ("cls:keep=0.5", (Cls(0.5),)),
        ("mustdrop", (MustDrop(),)),
        ("mustdrop:192", (MustDrop(0.001, 0.001),)),
        ("mustdrop:128", (MustDrop(0.0012, 0.001),)),
        ("mustdrop:64", (MustDrop(0.011, 0.01),)),
        ("mustdrop:vizwiz-64", (MustDrop(0.005, 0.001),)),
        ("mustdrop:64,tau=off,key=0,layers=2/4", (MustDrop(0.011, 0.01, None, 0.0, (2, 4)),)),
        ("mustdrop:64,gamma=0.5", (MustDrop(0.5, 0.01),)),
        (" cls : keep = 0.5 + fastv", (Cls(0.5), FastV())),
        ("fastv:k=8+mustdrop:tau=off", (MustDrop(tau=None), FastV(8))),
        ("cdpruner:128", (CDPruner(128),)),
        ("cdpruner:keep=0.5,text=none", (CDPruner(0.5, "none"),)),
        ("dart:64", (Dart(64),)),
        ("dart:keep=0.5,k=0,text_pivots=0", (Dart(0.5, 0, 4, 0),)),
        ("cdpruner:keep=9+dart", (CDPruner(9), Dart())),
        ("lsm+cls", (Lsm(), Cls())),
        ("cls+lsm", (Cls(), Lsm())),
    ],
)
def test_a_spec_means_these_methods_in_the_order_in_which_they_work(text: str, parts: tuple[Any, ...]) -> None:
    assert parse(text) == parts


def test_the_canonical_spec_spells_every_option_out() -> None:
    assert to_spec(parse("mustdrop:64,tau=off")) == (
        "mustdrop:gamma=0.011,alpha=0.01,tau=off,key=0.08,layers=3/7/11/15,positions=keep,order=raster,keys=used-block"
    )
    assert to_spec(parse("lsm:tau=1+fastv")) == "lsm:tau=1,order=raster+fastv:k=2,ratio=0.5"
    assert to_spec(()) == "none"


SHARES = st.floats(0, 1)
KEEPS = st.floats(0, 1, exclude_min=True) | st.integers(2, 999).map(float)
METHODS = st.one_of(
    st.builds(FastV, st.integers(1, 99), SHARES),
    st.builds(Cls, st.floats(0, 1, exclude_min=True)),
    st.builds(CDPruner, KEEPS, st.sampled_from(["embedding", "none"])),
    st.builds(Dart, KEEPS, st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)),
    st.builds(Lsm, st.floats(-1, 1), st.sampled_from(["raster", "merged-first"])),
    st.builds(
        MustDrop, st.floats(0, 1e30), st.floats(0, 9), st.none() | st.floats(-1, 1), SHARES,
        st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted).map(tuple),
        st.sampled_from(["keep", "renumber"]), st.sampled_from(["raster", "merged-first"]),
        st.sampled_from(["used-block", "last-block"]),
    ),
)  # fmt: skip


@given(METHODS)
def test_the_canonical_spec_gives_the_same_method_again(method: Any) -> None:
    assert parse(to_spec((method,))) == (method,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no reduction is called ''; there are cdpruner, cls, dart, fastv, lsm, mustdrop"),
        ("tome", "no reduction is called 'tome'"),
        ("withdrawal", "no reduction is called"),
        ("fastv+", "no reduction is called ''"),
        ("fastv:rate=0.5", "fastv has no option 'rate'; it has k, ratio"),
        ("fastv:half", "fastv has no preset 'half'; it has none; write key=value"),
        ("fastv:k=2,half", "fastv has no option 'half'"),
        ("mustdrop:96", "mustdrop has no preset '96'; it has 192, 128, 64, vizwiz-64"),
        ("fastv:ratio=0.5,ratio=0.6", "ratio is given twice"),
        ("fastv:ratio=x", "fastv: ratio is 'x'; give a number"),
        ("fastv:ratio=", "fastv: ratio is ''; give a number"),
        ("fastv:ratio=nan", "fastv: ratio is 'nan'; give a number"),
        ("mustdrop:gamma=inf", "mustdrop: gamma is 'inf'; give a number"),
        ("fastv:ratio=1.01", "ratio is 1.01; give the share to leave out, from 0 to 1"),
        ("fastv:ratio=-0.1", "from 0 to 1"),
        ("fastv:k=2.5", "k is '2.5'; give a whole number"),
        ("fastv:k=0", "must be at least 1"),
        ("fastv:k=off", "give a whole number"),
        ("lsm:tau=1.5", "tau is 1.5; give a cosine from -1 to 1"),
        ("lsm:tau=-1.5", "from -1 to 1"),
        ("lsm:tau=off", "give a number"),
        ("lsm:order=random", "order is 'random'; it is one of raster, merged-first"),
        ("mustdrop:tau=1.5", "tau is 1.5; give a cosine from -1 to 1"),
        ("mustdrop:tau=on", r"tau \(off turns it off\) is 'on'; give a number"),
        ("cls:keep=0", "above 0 and up to 1"),
        ("cls:keep=1.1", "above 0 and up to 1"),
        (
            "cdpruner:keep=0",
            "keep is 0.0; give the share to keep, above 0 and up to 1, or a whole",
        ),
        ("cdpruner:keep=1.5", "or a whole number of at least 2"),
        ("cdpruner:text=clip", "cdpruner: text is 'clip'; it is one of embedding, none, tower"),
        ("cdpruner:text=all", "one of embedding, none, tower"),
        ("dart:k=-1", "k is -1; give the layer after which tokens leave, or 0 for before layer 1"),
        ("dart:pivots=0", "pivots is 0 and text_pivots 4; give at least 1 and 0"),
        ("dart:k=0,order=code", "order=code is that of the form after a layer"),
        ("dart+cdpruner", "write cdpruner first"),
        ("fastv+dart:k=0", "dart works before the decoder and fastv within it; write dart first"),
        ("mustdrop:key=2", "key is 2.0; give the share never to drop"),
        ("mustdrop:gamma=-1", "gamma is -1.0; a threshold must be at least 0"),
        ("mustdrop:layers=7/3", "layers are 7/3; give rising numbers"),
        ("mustdrop:layers=3/3", "give rising numbers"),
        ("mustdrop:layers=0/3", "give rising numbers"),
        ("mustdrop:layers=3//7", "give a whole number"),
        ("mustdrop:positions=drop", "one of keep, renumber"),
        ("fastv+fastv:k=3", r"fastv stands twice in --reduce fastv\+fastv"),
        ("lsm+mustdrop", "lsm and mustdrop both set tau"),
        ("fastv+cls", "cls works before the decoder and fastv within it; write cls first"),
        ("mustdrop:tau=off+lsm", "write lsm first"),
        ("fastv," * 300, "the limit is 1,000"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60) | st.from_regex(r"(mustdrop|fastv|lsm|cls):[a-z=,0-9./+-]{0,40}", fullmatch=True))
def test_nothing_but_a_request_error_comes_of_random_specs(text: str) -> None:
    try:
        parts = parse(text)
    except RequestError as e:
        assert "\n" not in str(e)  # noqa: PT017 - it need not be raised
    else:
        assert parse(to_spec(parts)) == parts


def test_every_method_of_the_package_is_registered_by_its_own_file() -> None:
    assert list(specs.kinds()) == ["cdpruner", "cls", "dart", "fastv", "lsm", "mustdrop"]
    for name, kind in specs.kinds().items():
        assert kind.__module__ == f"vtx.runtime.policies.methods.{name}"
        assert kind.__doc__


# --- what they need -------------------------------------------------------------------------------


def test_what_a_method_needs_of_a_bundle() -> None:
    assert FastV(3).needs() == Needs(cuts=(4,), queries=(3,))
    assert Lsm().needs() == Needs(merging=True)
    assert Cls().needs() == Needs(attention=True)
    assert CDPruner().needs() == Dart(k=0).needs() == Needs()
    assert Dart(k=5).needs() == Needs(cuts=(6,), final_norm=True)
    full = MustDrop().needs()
    assert full == Needs((4, 8, 12, 16), (3, 7, 11, 15), shrinks=3, merging=True, attention=True)
    assert full.boundaries == (3, 4, 8, 12, 16)
    released = MustDrop(keys="last-block").needs()
    assert (released.attention, released.last_attention) == (False, True)
    assert MustDrop(tau=None, key=0, layers=(1, 2)).needs().boundaries == (2, 3)


def test_needs_of_several_add_up() -> None:
    both = Policy((Withdraw(5), *parse("lsm+mustdrop:tau=off,key=0,layers=2/4+fastv:k=4"))).needs()
    assert both == Needs((3, 5), (2, 4), shrinks=2, merging=True)


def test_a_cut_past_the_last_layer_is_refused_by_name() -> None:
    check_depth(parse("fastv:k=7"), 8)
    with pytest.raises(RequestError, match="fastv drops tokens after layer 8, and this model has 8 layers"):
        check_depth(parse("fastv:k=8"), 8)
    with pytest.raises(RequestError, match="mustdrop drops tokens after layer 11"):
        check_depth(parse("mustdrop"), 8)


# --- which rows stay ------------------------------------------------------------------------------


def test_fastv_keeps_the_rows_most_looked_at_and_of_equal_ones_the_earlier() -> None:
    kept = FastV(2, 0.5).keep_mask(boundary([1, 5, 1, 1, 9, 1]))
    assert kept is not None
    assert kept.tolist() == [True, True, False, False, True, False]


@pytest.mark.parametrize(("ratio", "left"), [(0.0, 10), (0.05, 10), (0.1, 9), (0.3, 7), (0.99, 1), (1.0, 0)])
def test_fastv_rounds_what_leaves_down(ratio: float, left: int) -> None:
    kept = FastV(2, ratio).keep_mask(boundary(list(range(10))))
    assert (10 if kept is None else int(kept.sum())) == left


def test_fastv_asks_for_the_last_row_only() -> None:
    asked: list[bool] = []
    scores = np.ones(4, np.float32), np.ones(4, np.float32)
    here = Boundary(3, np.zeros((1, 4)), (), np.ones(4, bool), lambda last: (asked.append(last), scores)[1])
    FastV().keep_mask(here)
    MustDrop(key=0).keep_mask(here)
    assert asked == [True, False]


def test_mustdrop_drops_what_is_low_in_both_scores() -> None:
    # V = 20: gamma * V is 2. Row 0 is low in both, 1 in the sum only, 2 in the maximum only, 3 at the thresholds.
    method = MustDrop(gamma=0.1, alpha=0.5, tau=None, key=0)
    kept = method.keep_mask(boundary([1, 1, 16, 2], [0.4, 0.6, 0.4, 0.5]))
    assert kept is not None
    assert kept.tolist() == [False, True, True, True]


def test_mustdrop_spares_key_rows_chosen_among_all_that_entered() -> None:
    image = Patches(np.arange(4), np.zeros(4, bool), attention([9, 8, 1, 2]))
    present = np.array([False, True, True, True])
    scores = np.zeros(3, np.float32), np.zeros(3, np.float32)
    here = Boundary(4, np.zeros((1, 4)), (image,), present, lambda _: scores)
    method = MustDrop(gamma=0.1, alpha=0.5, tau=None, key=0.5)
    kept = method.keep_mask(here)
    assert kept is not None
    # Half of four rows are keys: 0, which has left, and 1. Sums of 0 are not below a share of 0, so alpha decides.
    assert kept.tolist() == [True, True, True]
    low = np.array([1, 1, 98], np.float32), np.zeros(3, np.float32)
    kept = method.keep_mask(dataclasses.replace(here, scores=lambda _: low))
    assert kept is not None
    assert kept.tolist() == [True, False, True]


def test_key_rows_are_chosen_image_by_image() -> None:
    images = [Patches(np.arange(3), np.zeros(3, bool), attention(a)) for a in ([1, 2, 3], [30, 20, 10], [5, 5, 5])]
    assert keys(images, 0.3).tolist() == [False, False, True, True, False, False, True, False, False]
    assert keys([], 0.3).tolist() == []


@given(st.floats(0, 1), st.integers(0, 1000))
def test_a_share_is_rounded_up_but_for_the_error_of_binary_fractions(part: float, count: int) -> None:
    found = share(part, count)
    assert 0 <= found <= count
    assert -1e-6 <= found - part * count < 1
    assert share(0.07, 100) == 7
    assert math.ceil(0.07 * 100) == 8


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 40))
def test_the_highest_are_as_sorting_says(values: list[int], count: int) -> None:
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert np.flatnonzero(highest(np.array(values, np.float32), count)).tolist() == sorted(wanted)


def test_cls_keeps_the_share_rounded_up_in_the_order_there() -> None:
    image = ImageTokens(np.zeros((5, 2), np.float32), boundary([0] * 5, keys=[1, 5, 4, 2, 3]).images[0])
    entered = Cls(0.5).select(image)
    assert entered is not None
    assert entered.tolist() == [1, 2, 4]


def test_merged_first_moves_the_most_alike_windows_to_the_front_behind_the_class_token() -> None:
    places, merged = np.array([-1, 0, 3, 4, 9, 12]), np.array([False, False, True, False, True, True])
    patches = Patches(places, merged, {"similarity": np.array([0, 0, 0.8, 0, 0.9, 0.8], np.float32)})
    image = ImageTokens(np.zeros((6, 2), np.float32), patches)
    order = Lsm(order="merged-first").select(image)
    assert order is not None
    assert image.take(order).patches.indices.tolist() == [-1, 9, 3, 12, 0, 4]
    assert Lsm().select(image) is None


def test_rows_without_merging_are_a_square_of_patches_and_maybe_a_class_token() -> None:
    assert ImageTokens.plain(np.zeros((16, 2), np.float32)).patches.indices.tolist() == list(range(16))
    assert ImageTokens.plain(np.zeros((17, 2), np.float32)).patches.indices.tolist() == list(range(-1, 16))


def test_cdpruner_takes_the_most_relevant_row_first_and_then_what_is_unlike_it() -> None:
    # Tokens 0 and 1 are the same; 2 is at right angles to them and less relevant.
    cosines = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], np.float32)
    relevance = scaled(np.array([3, 2.9, 1], np.float32))
    kernel = relevance[:, None] * cosines * relevance[None]
    assert greedy(kernel, 1).tolist() == [0]
    assert greedy(kernel, 2).tolist() == [0, 2]
    assert greedy(kernel, 3).tolist() == [0, 1, 2]


def test_cdpruner_takes_the_earlier_of_equal_gains_and_never_a_row_twice() -> None:
    assert greedy(np.eye(5, dtype=np.float32), 3).tolist() == [0, 1, 2]
    assert greedy(np.ones((5, 5), np.float32), 3).tolist() == [0, 1, 2]
    assert scaled(np.full(4, 0.5, np.float32)).tolist() == [1, 1, 1, 1]


def test_relevance_leaves_the_least_relevant_row_an_offset_only() -> None:
    least, middle, most = scaled(np.array([1, 2, 3], np.float32)).tolist()
    assert (least, middle, most) == pytest.approx((5e-7, 0.5, 1.0), abs=1e-6)


def pivoting(rows: list[list[float]], text: list[list[float]], sizes: list[float], text_sizes: list[float]) -> Boundary:
    """A boundary with these hidden states, and keys of one component."""
    hidden, keys = np.array(rows, np.float32), tuple(np.array([s], np.float32).T for s in (sizes, text_sizes))
    image = Patches(np.arange(len(rows)), np.zeros(len(rows), bool))
    return Boundary(
        3, np.array(text, np.float32), (image,), np.ones(len(rows), bool), image_hidden=lambda: hidden,
        keys=lambda: (keys[0], keys[1]), final_norm=np.ones(hidden.shape[1], np.float32),
    )  # fmt: skip


def test_dart_keeps_pivots_and_what_is_least_like_each_in_turn() -> None:
    rows: list[list[float]] = [[1, 0], [0, 1], [-1, 0], [1, 0.1], [0, -1], [0.9, 0.2]]
    here = pivoting(rows, [[0, 1], [1, 1]], [-9, 1, 2, 3, 4, 5], [1, 7])
    # The pivot is row 0, whose key is longest whatever its sign; row 2 is least like it. Of the text the second is the
    # longer: row 4 is least like it.
    kept = Dart(2, 2, 1, 1).keep_mask(here)
    assert kept is not None
    assert kept.tolist() == [True, False, True, False, True, False]


def test_dart_leaves_an_image_alone_that_is_no_longer_than_what_it_keeps() -> None:
    here = pivoting([[1, 0]] * 5, [[0, 1]], [1] * 5, [1])
    assert Dart(4, 2, 1, 1).keep_mask(here) is None
    assert Dart(0.5, 0, 4, 0).select(ImageTokens.plain(np.ones((9, 2), np.float32))) is None


def test_dart_before_layer_1_looks_at_text_before_the_image_too() -> None:
    rows = np.random.default_rng(0).standard_normal((16, 8), dtype=np.float32)
    text = np.random.default_rng(1).standard_normal((3, 8), dtype=np.float32)
    text[0] *= 9
    chosen = []
    for sign in (1, -1):
        hidden = text * np.array([[sign], [1], [1]], np.float32)
        question = PromptText(np.arange(3), hidden, np.array([False, True, True]))
        selected = Dart(6, 0, 1, 1).select(ImageTokens.plain(rows), question)
        assert selected is not None
        chosen.append(selected.tolist())
    assert len(chosen[0]) == len(chosen[1]) == 6
    assert chosen[0] != chosen[1]


def test_tokens_that_keep_their_positions_go_on_keeping_them() -> None:
    image = ImageTokens.plain(np.zeros((16, 2), np.float32))
    assert image.take(np.array([3, 5])).positions == 2
    gaps = image.take(np.array([3, 5, 9]), keep_positions=True)
    assert (gaps.offsets is not None, gaps.positions) == (True, 16)
    later = gaps.take(np.array([0, 2]))
    assert later.offsets is not None
    assert (later.offsets.tolist(), later.positions) == ([3, 9], 16)


# --- together -------------------------------------------------------------------------------------


def test_nobody_is_asked_once_the_image_has_left() -> None:
    """The boundary's scores would raise."""
    policy = Policy((Withdraw(3), FastV(2)))
    departure = policy.ask(Boundary(3, np.zeros((1, 4)), (), np.ones(6, bool)))
    assert departure is not None
    assert departure.by == ("withdrawal",)
    assert not departure.kept.any()


def test_only_those_whose_cut_it_is_are_asked() -> None:
    policy = Policy((Full(), FastV(2), MustDrop(tau=None, key=0, layers=(4,))))
    assert policy.ask(Boundary(7, np.zeros((1, 4)), (), np.ones(6, bool))) is None
    departure = policy.ask(boundary([1, 2, 3, 4], layer=3))
    assert departure is not None
    assert departure.by == ("fastv",)


def test_policies_of_equal_options_are_equal_whatever_their_gates_have_said() -> None:
    first, second = (Policy((Gate(lambda *_: np.zeros(2), (3,)), *parse("mustdrop"))) for _ in range(2))
    first.ask(Boundary(3, np.zeros((1, 4)), (), np.ones(1, bool)))
    assert first == second
    assert first != Policy((Full(), *parse("mustdrop")))


# --- adding one -----------------------------------------------------------------------------------


@pytest.fixture
def every(tmp_path: Path) -> Iterator[str]:
    """The policy that CONTRIBUTING.md shows, registered for one test."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## How to add a policy") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    specs.kinds()  # the package's own come first
    (tmp_path / "every.py").write_text(code[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("every", tmp_path / "every.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["every"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield "every"
    del registry.registered["every"], sys.modules["every"]


def test_the_policy_that_contributing_shows_runs_from_export_to_answer(
    every: str, tmp_path: Path, tiny_checkpoint: Checkpoints
) -> None:
    out = tmp_path / "bundle"
    line = ["--model", str(tiny_checkpoint()), "--k", "5", "--precision", "fp32", "--reduce", "every:n=2"]
    done = CliRunner().invoke(cli.export, [*line, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    options = Options(max_new_tokens=4, ignore_eos=True)
    with load(out, threads=THREADS).open(random_image(1)) as image:
        answer, plain = image.ask("red?", None, options), image.ask("red?", None, options, reduce="none")
        thirds = image.ask("red?", 5, options, reduce="every:n=3")
    assert answer.stats.reduce == "every:n=2,k=2"
    assert answer.stats.vision_tokens_kept == (16, 16, *[8] * 6)
    assert answer.stats.reduced is not None
    assert answer.stats.reduced.kept[-1].patches == (tuple(range(0, 16, 2)),)
    assert thirds.stats.vision_tokens_kept == (16, 16, 6, 6, 0, 0, 0, 0)
    assert plain.stats.vision_tokens_kept == (16,) * 8
    assert plain.stats.reduced is None
