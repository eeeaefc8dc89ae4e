"""Devices are recognised by their device tree or by nvidia-smi, here on copies of what they say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtx.profiles import load_profile, profile_names
from vtx.runtime.host.device import recognise, swap

RELEASE = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 2025\n"
STATUS = """Package: nvidia-jetpack
Status: install ok installed
Version: 6.2+b77

Package: libnvinfer8
Status: deinstall ok config-files
Version: 8.5.2-1+cuda11.4

Package: libnvinfer10
Status: install ok installed
Version: 10.3.0.30-1+cuda12.5
"""


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def no_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty root, and a PATH without nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def says(root: Path, lines: str, *, code: int = 0) -> None:
    """Put an nvidia-smi on the PATH that prints `lines`."""
    put(root, "bin/nvidia-smi", f"#!/bin/sh\nprintf '{lines}'\nexit {code}\n")
    (root / "bin/nvidia-smi").chmod(0o755)


def jetson(root: Path, module: str = "p3767-0005", soc: str = "tegra234") -> None:
    put(root, "proc/device-tree/model", "NVIDIA Jetson Orin Nano Developer Kit\0")
    put(root, "proc/device-tree/compatible", f"nvidia,p3768-0000+{module}\0nvidia,{module}\0nvidia,{soc}\0")


def test_a_jetson_is_known_by_its_module_and_its_software(no_cards: Path) -> None:
    jetson(no_cards)
    put(no_cards, "etc/nv_tegra_release", RELEASE)
    put(no_cards, "var/lib/dpkg/status", STATUS)
    found = recognise(no_cards)
    assert found.profile == "orin-nano-8"
    assert found.jetson is not None
    assert found.jetson.model == "NVIDIA Jetson Orin Nano Developer Kit"
    assert (found.jetson.module, found.jetson.l4t) == ("p3767-0005", "36.4.3")
    assert (found.jetson.jetpack, found.jetson.tensorrt) == ("6.2", "10.3.0.30")


@pytest.mark.parametrize("name", [n for n in profile_names() if load_profile(n).kind == "jetson"])
def test_every_jetson_profile_is_found_by_each_of_its_modules(no_cards: Path, name: str) -> None:
    for module in load_profile(name).modules:
        jetson(no_cards, module)
        assert recognise(no_cards).profile == name


def test_no_two_profiles_claim_the_same_device() -> None:
    profiles = [load_profile(name) for name in profile_names()]
    modules = [module for profile in profiles for module in profile.modules]
    assert len(set(modules)) == len(modules)
    assert len({profile.name for profile in profiles}) == len(profiles)


@pytest.mark.parametrize(
    ("release", "jetpack"), [("R35", "5"), ("R36", "6"), ("R38", "7"), ("R39", "7"), ("R99", None)]
)
def test_without_its_package_jetpack_follows_from_linux_for_tegra(
    no_cards: Path, release: str, jetpack: str | None
) -> None:
    jetson(no_cards)
    put(no_cards, "etc/nv_tegra_release", RELEASE.replace("R36", release))
    found = recognise(no_cards).jetson
    assert found is not None
    assert found.jetpack == jetpack


def test_a_jetson_without_a_profile_is_still_a_jetson(no_cards: Path) -> None:
    jetson(no_cards, "p3668-0000", "tegra194")
    found = recognise(no_cards)
    assert found.profile is None
    assert found.jetson is not None
    assert found.jetson.module == "p3668-0000"
    assert found.jetson.l4t is None


def test_a_desktop_card_is_known_by_nvidia_smi(no_cards: Path) -> None:
    says(no_cards, "NVIDIA GeForce RTX 4090, 8.9, 24564, 23000, 570.124\\n")
    found = recognise(no_cards)
    assert found.jetson is None
    assert found.profile == "rtx-4090"
    assert found.gpus[0].target == "sm89"
    assert (found.gpus[0].memory, found.gpus[0].free) == (24564 << 20, 23000 << 20)


def test_memory_that_the_driver_does_not_tell_is_unknown(no_cards: Path) -> None:
    says(no_cards, "NVIDIA Thor, 11.0, [N/A], [N/A], 580.00\\n")
    assert recognise(no_cards).gpus[0].memory is None


@pytest.mark.parametrize("lines", ["", "NVIDIA-SMI has failed\\n", "a, b, c, d, e\\n", "one, 8.9\\n"])
@pytest.mark.parametrize("code", [0, 9])
def test_what_nvidia_smi_cannot_say_is_no_card(no_cards: Path, lines: str, code: int) -> None:
    says(no_cards, lines, code=code)
    assert recognise(no_cards).gpus == ()


def test_a_machine_without_either_is_neither(no_cards: Path) -> None:
    found = recognise(no_cards)
    assert (found.jetson, found.gpus, found.profile) == (None, (), None)


def test_swap_is_read_in_bytes(no_cards: Path) -> None:
    assert swap(no_cards) is None
    put(no_cards, "proc/meminfo", "MemTotal:  8000000 kB\nSwapTotal:        2048 kB\n")
    assert swap(no_cards) == 2 << 20
