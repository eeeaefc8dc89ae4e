"""Devices are recognised by their device tree or by their driver, here on copies of what those say."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from vtx.runtime.host.device import recognise, swap
from vtx.runtime.host.gpu import find_gpu
from vtx.runtime.host.profiles import load_profile, profile_names

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


class Driver:
    """CUDA's driver with these GPUs: name, compute capability, bytes of memory. `fails` names calls that fail."""

    def __init__(self, *gpus: tuple[str, tuple[int, int], int], fails: str = "") -> None:
        self.gpus, self.fails = gpus, fails

    def cuInit(self, flags: int) -> int:
        return int(self.fails == "cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return int(self.fails == "cuDeviceGetCount")

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return int(self.fails == "cuDeviceGet")

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = self.gpus[device.value][0].encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: ctypes.c_int) -> int:
        memory._obj.value = self.gpus[device.value][2]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = self.gpus[device.value][1][attribute - 75]
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0


CARD = ("NVIDIA GeForce RTX 4090", (8, 9), 24 << 30)


@pytest.fixture
def no_cards(tmp_path: Path) -> Path:
    """An empty root."""
    return tmp_path


def jetson(root: Path, module: str = "p3767-0005", soc: str = "tegra234") -> None:
    put(root, "proc/device-tree/model", "NVIDIA Jetson Orin Nano Developer Kit\0")
    put(root, "proc/device-tree/compatible", f"nvidia,p3768-0000+{module}\0nvidia,{module}\0nvidia,{soc}\0")


def test_a_jetson_is_known_by_its_module_and_its_software(no_cards: Path) -> None:
    jetson(no_cards)
    put(no_cards, "etc/nv_tegra_release", RELEASE)
    put(no_cards, "var/lib/dpkg/status", STATUS)
    found = recognise(no_cards, Driver())
    assert found.profile == "orin-nano-8"
    assert found.jetson is not None
    assert found.jetson.model == "NVIDIA Jetson Orin Nano Developer Kit"
    assert (found.jetson.module, found.jetson.l4t) == ("p3767-0005", "36.4.3")
    assert (found.jetson.jetpack, found.jetson.tensorrt) == ("6.2", "10.3.0.30")


@pytest.mark.parametrize("name", [n for n in profile_names() if load_profile(n).kind == "jetson"])
def test_every_jetson_profile_is_found_by_each_of_its_modules(no_cards: Path, name: str) -> None:
    for module in load_profile(name).modules:
        jetson(no_cards, module)
        assert recognise(no_cards, Driver()).profile == name


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
    found = recognise(no_cards, Driver()).jetson
    assert found is not None
    assert found.jetpack == jetpack


def test_a_jetson_without_a_profile_is_still_a_jetson(no_cards: Path) -> None:
    jetson(no_cards, "p3668-0000", "tegra194")
    found = recognise(no_cards, Driver())
    assert found.profile is None
    assert found.jetson is not None
    assert found.jetson.module == "p3668-0000"
    assert found.jetson.l4t is None


def test_a_desktop_card_is_known_by_its_driver(no_cards: Path) -> None:
    device = recognise(no_cards, Driver(CARD))
    assert device.jetson is None
    assert device.profile == "rtx-4090"
    (gpu,) = device.gpus
    assert (gpu.sm, gpu.capability, gpu.memory, gpu.cuda) == ("sm89", (8, 9), 24 << 30, (12, 8))


def test_every_card_is_listed_and_the_first_is_the_one_to_use(no_cards: Path) -> None:
    driver = Driver(("NVIDIA RTX 6000", (12, 0), 96 << 30), CARD)
    assert [gpu.sm for gpu in recognise(no_cards, driver).gpus] == ["sm120", "sm89"]
    first = find_gpu(0, driver)
    assert first is not None
    assert first.sm == "sm120"


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGetCount", "cuDeviceGet"])
def test_a_driver_that_fails_shows_no_card(no_cards: Path, fails: str) -> None:
    assert recognise(no_cards, Driver(CARD, fails=fails)).gpus == ()
    assert find_gpu(0, Driver(CARD, fails=fails)) is None


def test_a_machine_without_either_is_neither(no_cards: Path) -> None:
    found = recognise(no_cards, Driver())
    assert (found.jetson, found.gpus, found.profile) == (None, (), None)


def test_swap_is_read_in_bytes(no_cards: Path) -> None:
    assert swap(no_cards) is None
    put(no_cards, "proc/meminfo", "MemTotal:  8000000 kB\nSwapTotal:        2048 kB\n")
    assert swap(no_cards) == 2 << 20
