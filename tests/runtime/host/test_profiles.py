"""Device profiles: each one is read, sourced and plausible; a damaged one is refused by key."""

from __future__ import annotations

from importlib.resources import files

import pytest

from vtx.runtime.host.profiles import Profile, ProfileError, load_profile, parse_profile, profile_names

WANTED = {
    "orin-nano-4", "orin-nano-8", "orin-nx-8", "orin-nx-16", "agx-orin-32", "agx-orin-64", "agx-thor", "cpu",
    *(f"rtx-{n}" for n in (3060, 3070, 3080, 3090, 4060, 4070, 4080, 4090, 5070, 5080, 5090)),
}  # fmt: skip
FIGURES = ("memory_gib", "system_gib", "bandwidth", "fp32", "fp16", "int8", "int4")
TEXT = (files("vtx.profiles") / "agx-orin-64.toml").read_text(encoding="utf-8")


@pytest.fixture(params=profile_names())
def profile(request: pytest.FixtureRequest) -> Profile:
    return load_profile(request.param)


def test_the_devices_that_users_have_are_there() -> None:
    assert set(profile_names()) >= WANTED


def test_every_figure_names_its_source(profile: Profile) -> None:
    for name in FIGURES:
        figure = getattr(profile, name)
        assert figure is None or len(figure.source) > 15, name
    assert all(release.source for release in profile.jetpack)


def test_narrower_arithmetic_is_faster_and_dense_peaks_keep_their_ratios(profile: Profile) -> None:
    if profile.kind == "cpu":
        assert profile.fp16 is None
        return
    assert profile.fp16 is not None
    assert profile.int8 is not None
    assert profile.int8.value / profile.fp16.value == pytest.approx(4 if profile.kind == "desktop" else 2, rel=0.02)
    assert profile.fp16.value > profile.fp32.value
    if profile.int4 is not None:
        assert profile.int4.value / profile.int8.value == pytest.approx(2, rel=0.01)


def test_a_jetson_shares_its_memory_and_a_desktop_card_does_not(profile: Profile) -> None:
    assert profile.unified == (profile.kind != "desktop")
    assert (profile.compute_capability is None) == (profile.kind == "cpu")
    assert bool(profile.jetpack) == (profile.kind == "jetson")


def test_system_memory_is_kept_back() -> None:
    assert load_profile("agx-orin-64").usable_bytes == 61 << 30


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"no profile is called 'orin'; there are agx-orin-32, .*rtx-5090"):
        load_profile("orin")
    with pytest.raises(ProfileError, match="no profile is called"):
        load_profile("../runtime/errors")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("unified = true", "unified = true\ncolour = 1", "unknown key 'colour'"),
        ("unified = true", "", "key 'unified' is missing"),
        ("unified = true", "unified = 1", "unified is '1', not bool"),
        ('kind = "jetson"', 'kind = "toaster"', "kind is 'toaster'"),
        ("value = 204.8,", 'value = "fast",', "value is 'fast', not float"),
        ("value = 204.8,", "value = true,", "value is 'True', not float"),
        ("value = 204.8,", "value = -1,", "not a positive number"),
        ("value = 204.8,", "value = nan,", "not a positive number"),
        ("value = 204.8,", "value = inf,", "not a positive number"),
        ("value = 204.8,", "", "key 'value' is missing"),
        ("value = 3,", "value = 64,", "leaves no memory"),
        ('tensorrt = "8.5"', 'tensort = "8.5"', "unknown key 'tensort'"),
        ("unified = true", "unified =", "is not TOML"),
        ('kind = "jetson"', 'kind = "desktop"', "jetpack is required for Jetson profiles"),
    ],
)
def test_a_damaged_profile_is_refused_by_name(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ProfileError, match=message):
        parse_profile(TEXT.replace(old, new, 1), "x.toml")


def test_a_figure_without_a_source_is_refused() -> None:
    with pytest.raises(ProfileError, match="no source"):
        parse_profile(TEXT.replace('"NVIDIA Jetson AGX Orin Series Technical Brief"', '" "', 1), "x.toml")
