"""Specs of reductions and back, and what they need of a bundle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtx.runtime.errors import RequestError
from vtx.runtime.policies import Needs, parse, to_spec
from vtx.runtime.policies import spec as specs
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.make import check_depth
from vtx.runtime.policies.methods.cdpruner import CDPruner
from vtx.runtime.policies.methods.cls import Cls
from vtx.runtime.policies.methods.dart import Dart
from vtx.runtime.policies.methods.fastv import FastV
from vtx.runtime.policies.methods.lsm import Lsm
from vtx.runtime.policies.methods.mustdrop import MustDrop
from vtx.runtime.policies.methods.pyramiddrop import PyramidDrop
from vtx.runtime.policies.methods.withdraw import Withdraw

AS_RELEASED: Any = {"positions": "renumber", "order": "merged-first", "keys": "last-block"}

# ---- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("none", ()),
        ("fastv", (FastV(),)),
        ("fastv:k=3,ratio=0.75", (FastV(3, 0.75),)),
        ("lsm:tau=0.9,order=merged-first", (Lsm(0.9, "merged-first"),)),
        ("cls:keep=0.5", (Cls(0.5),)),
        ("mustdrop", (MustDrop(),)),
        ("mustdrop:192", (MustDrop(0.001, 0.001, **AS_RELEASED),)),
        ("mustdrop:128", (MustDrop(0.0012, 0.001, **AS_RELEASED),)),
        ("mustdrop:64", (MustDrop(0.011, 0.01, **AS_RELEASED),)),
        ("mustdrop:vizwiz-64", (MustDrop(0.005, 0.001, **AS_RELEASED),)),
        ("mustdrop:64,tau=off,key=0,layers=2/4", (MustDrop(0.011, 0.01, None, 0.0, (2, 4), **AS_RELEASED),)),
        ("mustdrop:64,gamma=0.5", (MustDrop(0.5, 0.01, **AS_RELEASED),)),
        ("mustdrop:64,positions=keep,order=raster,keys=used-block", (MustDrop(0.011, 0.01),)),
        (" cls : keep = 0.5 + fastv", (Cls(0.5), FastV())),
        ("fastv:k=8+mustdrop:tau=off", (MustDrop(tau=None), FastV(8))),
        ("cdpruner:128", (CDPruner(128, "tower"),)),
        ("cdpruner:128,text=embedding", (CDPruner(128),)),
        ("cdpruner:keep=0.5,text=none", (CDPruner(0.5, "none"),)),
        ("dart:64", (Dart(64, order="code"),)),
        ("dart:64,order=size", (Dart(64),)),
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
        "mustdrop:gamma=0.011,alpha=0.01,tau=off,key=0.08,layers=3/7/11/15,positions=renumber,order=merged-first,"
        "keys=last-block"
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
        (
            "",
            "no reduction is called ''; there are cdpruner, cls, dart, divprune, evs, fastv, hiprune, lsm, mustdrop, "
            "pyramiddrop, random, vidcom2",
        ),
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
        ("dart:pivots=0", "pivots is 0; it must be at least 1"),
        ("dart:k=0,order=code", "order=code, which presets set, works only after a layer; .* use order=size"),
        ("dart:64,k=0", "order=code, which presets set, works only after a layer"),
        ("dart+cdpruner", "write cdpruner first"),
        ("fastv+dart:k=0", "dart works before the decoder and fastv within it; write dart first"),
        ("mustdrop:key=2", "key is 2.0; give the share never to drop"),
        ("mustdrop:gamma=-1", "gamma is -1.0; a threshold must be at least 0"),
        ("mustdrop:layers=7/3", "layers is 7/3; give rising numbers"),
        ("mustdrop:layers=3/3", "give rising numbers"),
        ("mustdrop:layers=0/3", "give rising numbers"),
        ("mustdrop:layers=3//7", "give a whole number"),
        ("mustdrop:positions=drop", "one of keep, renumber"),
        ("fastv+fastv:k=3", r"fastv is named twice in --reduce fastv\+fastv"),
        ("lsm+mustdrop", "lsm and mustdrop both set tau"),
        ("visionzip+lsm", "lsm and visionzip both work on the tower's patches; leave one out"),
        ("cls+visionzip", "cls and visionzip both work on the tower's patches"),
        ("visionzip+mustdrop:tau=off,layers=2", "mustdrop and visionzip both work on the tower's patches"),
        ("visionzip+hiprune", "hiprune and visionzip both work on the tower's patches"),
        ("lsm+hiprune", "lsm and hiprune both work on the tower's patches"),
        ("random+visionzip", "visionzip works on all of the tower's patches; write it before random"),
        ("cls+hiprune", "hiprune works on all of the tower's patches; write it before cls"),
        ("fastv+cls", "cls works before the decoder and fastv within it; write cls first"),
        ("mustdrop:tau=off+lsm", "write lsm first"),
        ("fastv," * 300, "the limit is 1,000"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(st.text(max_size=60) | st.from_regex(r"(mustdrop|fastv|lsm|cls):[a-z=,0-9./+-]{0,40}", fullmatch=True))
def test_nothing_but_a_request_error_comes_of_random_specs(text: str) -> None:
    try:
        parts = parse(text)
    except RequestError as e:
        assert "\n" not in str(e)  # noqa: PT017 - it need not be raised
    else:
        assert parse(to_spec(parts)) == parts


def test_every_method_of_the_package_is_registered_by_its_own_file() -> None:
    assert list(specs.kinds()) == [
        "cdpruner",
        "cls",
        "dart",
        "divprune",
        "evs",
        "fastv",
        "hiprune",
        "lsm",
        "mustdrop",
        "pyramiddrop",
        "random",
        "vidcom2",
        "visionzip",
    ]
    for name, kind in specs.kinds().items():
        assert kind.__module__ == f"vtx.runtime.policies.methods.{name}"
        assert kind.__doc__


# ---- what they need --------------------------------------------------------------------------------------------------


def test_what_a_method_needs_of_a_bundle() -> None:
    assert FastV(3).needs() == Needs(cuts=(4,), queries=(3,))
    assert Lsm().needs() == Needs(merging=True)
    pyramid = PyramidDrop(layers=(2, 4)).needs()
    assert pyramid == Needs(cuts=(3, 5), ahead=frozenset({3, 5}))
    assert pyramid.boundaries == (3, 4, 5, 6)
    assert (pyramid | FastV(4).needs()).scored == (3, 4, 5)
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
    both = Policy((Withdraw(5), *parse("lsm+mustdrop:tau=off,key=0,layers=2/4+fastv:k=4"))).needs
    assert both == Needs((3, 5), (2, 4), shrinks=2, merging=True)


def test_a_cut_past_the_last_layer_is_refused_by_name() -> None:
    check_depth(parse("fastv:k=7"), 8)
    with pytest.raises(RequestError, match="fastv drops tokens after layer 8, and this model has 8 layers"):
        check_depth(parse("fastv:k=8"), 8)
    with pytest.raises(RequestError, match="mustdrop drops tokens after layer 11"):
        check_depth(parse("mustdrop"), 8)
