"""Parts of libvtx by themselves: resampling, image files, random numbers, specs, and files that nobody vouches for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.cpp import needs_cpp, output, run
from tests.support.old_pillow import OLD, REASON, down_first
from tests.support.png_texts import TEXT_CHUNKS
from tests.support.tiny import random_image
from vtx.runtime.errors import RequestError
from vtx.runtime.generator import SplitMix
from vtx.runtime.policies.spec import parse, to_spec
from vtx.runtime.vision.files.source import bgr, from_array
from vtx.runtime.vision.image import load_image, to_rgb

pytestmark = needs_cpp

ROOT = Path(__file__).parents[3]
FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
SIZES = (
    (80, 60, 33, 47), (33, 47, 80, 60), (200, 3, 10, 10), (1, 1, 5, 7), (64, 64, 64, 20), (64, 64, 20, 64),
    (40, 90, 56, 56), (50, 50, 36, 22), (50, 50, 37, 22),
)  # fmt: skip
SPECS = (
    "none",
    "fastv",
    "fastv:k=3,ratio=0.3",
    *(f"{name}:{count}" for name in ("mustdrop", "cdpruner", "dart") for count in (192, 128, 64)),
    "mustdrop:vizwiz-64",
    "mustdrop:64,tau=off",
    "mustdrop:64,positions=keep,order=raster,keys=used-block",
    "cdpruner:128,text=embedding",
    "dart:64,order=size",
    "dart:64,k=0",
    "mustdrop:layers=2/4/6,keys=last-block",
    "lsm+fastv:ratio=1e-05",
    "dart:128+mustdrop:tau=off",
    "cdpruner:keep=0.1,text=none",
    "cls",
    "dart:k=0,keep=64",
    "fastv:k=2,k=3",
    "fastv:ratio=2",
    "fastv:k=0",
    "mustdrop:tau=3",
    "lsm:tau=0.5+mustdrop",
    "fastv+lsm",
    "fastv+fastv",
    "dart:order=x",
    "cdpruner:text=clip",
    "cdpruner:text=tower",
    "cls:keep=0",
    "dart:keep=1.5",
    "nothing",
    "fastv:",
    "fastv:half",
    "fastv:ratio=nan",
    "fastv:ratio=1.5",
    "fastv:k=2,half",
    "fastv:rate=1",
    "fastv:k=-0",
    "fastv:ratio=-0",
    "cls:keep=-0.0",
    "cdpruner:keep=1e300",
    "mustdrop:key=-0",
    "mustdrop:tau=0",
    "mustdrop:tau=on",
    "mustdrop:96",
    "mustdrop:layers=",
    "mustdrop:layers=3//7",
    "mustdrop:layers=0/3",
    "mustdrop:key=2",
    "dart:pivots=0",
    "dart:text_pivots=-1",
    "dart:k=-1",
    "dart:64,k=0",
    "fastv," * 300,
    "mustdrop:layers=4/2",
    "mustdrop:gamma=-1",
    "fastv:k=99999999999",
    "",
    "dart:k=0,order=code",
    "pyramiddrop",
    "pyramiddrop:released",
    "pyramiddrop:released,ratio=0.3,layers=2/5",
    "pyramiddrop:ratio=1.1",
    "pyramiddrop:layers=0/2",
    "pyramiddrop:64",
)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_resized_pictures_are_pillow_s(name: str, sizes: tuple[int, int, int, int]) -> None:
    if OLD and down_first(*sizes):
        pytest.skip(REASON)
    width, height, new_width, new_height = sizes
    image = random_image(5, (width, height))
    want = np.asarray(image.resize((new_width, new_height), Image.Resampling[name.upper()]))
    found = output("probe", "resize", *map(str, sizes), name, stdin=np.asarray(image).tobytes())
    assert np.frombuffer(found, np.uint8).tolist() == want.ravel().tolist()


def saved(folder: Path) -> dict[str, Path]:
    """Pictures in every form that libvtx reads."""
    image, alpha = random_image(2, (61, 43)), random_image(3, (61, 43)).convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    faded = image.copy()
    faded.putalpha(alpha)
    forms = {
        "rgb.png": (image, {}),
        "rgba.png": (faded, {}),
        "grey.png": (image.convert("L"), {}),
        "palette.png": (image.quantize(17), {}),
        "bits.png": (image.convert("1"), {}),
        "turned.png": (image, {"exif": exif}),
        "la.png": (faded.convert("LA"), {}),
        "plain.jpg": (image, {"quality": 90}),
        "grey.jpg": (image.convert("L"), {}),
        "inks.jpg": (image.convert("CMYK"), {"quality": 95}),
        "turned.jpg": (image, {"exif": exif}),
        "progressive.jpg": (image, {"progressive": True, "subsampling": 0}),
    }
    for name, (picture, options) in forms.items():
        picture.save(folder / name, **options)
    for turn in range(2, 9):
        exif[0x0112] = turn
        image.save(folder / f"turn-{turn}.jpg", exif=exif)
    for form, content in TEXT_CHUNKS.items():
        (folder / f"{form}.png").write_bytes(content)
    wide = np.random.default_rng(4).integers(0, 65536, (43, 61)).astype(np.uint16)
    Image.fromarray(wide).save(folder / "wide.png")
    Image.fromarray(wide).save(folder / "wide-key.png", transparency=int(wide[2, 3]))
    return {path.name: path for path in folder.iterdir()}


def test_image_files_are_the_pixels_that_python_sees(tmp_path: Path) -> None:
    for name, path in saved(tmp_path).items():
        want = np.asarray(load_image(path)).astype(int)
        found = run("probe", "picture", path)
        assert found.stderr.decode().split() == [str(want.shape[1]), str(want.shape[0])], name
        difference = np.abs(np.frombuffer(found.stdout, np.uint8).reshape(want.shape).astype(int) - want)
        assert difference.max() <= 1, name


def test_a_cache_of_more_bytes_than_64_bits_count_is_refused() -> None:
    done = run("probe", "cache", "4", str(1 << 39), str(1 << 13))
    assert done.returncode == 1
    assert f"not enough memory for a KV cache of {1 << 39} slots" in done.stderr.decode()


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**32, 2**63 + 5])
def test_random_numbers_are_those_of_python(seed: int) -> None:
    generator = SplitMix(seed)
    found = [float(line) for line in output("probe", "uniforms", str(seed), "50").split()]
    assert found == [generator.uniform() for _ in range(50)]


def test_specs_are_read_and_refused_as_in_python() -> None:
    found = output("probe", "specs", stdin="".join(f"{spec}\n" for spec in SPECS).encode()).decode().splitlines()
    assert len(found) == len(SPECS)
    for spec, got in zip(SPECS, found, strict=True):
        try:
            want = to_spec(parse(spec))
        except RequestError as e:
            want = f"error: {e}"
        assert got == want, spec


@pytest.mark.parametrize("seed", [1, 2])
def test_altered_files_are_refused_and_nothing_worse(seed: int, tmp_path: Path) -> None:
    """Under `make cpp-sanitize` a read beyond the end, or an overflow, ends the process."""
    pictures = saved(tmp_path)
    (tmp_path / "made.safetensors").write_bytes(safetensors())
    corpora = {
        "tokenizer": [ROOT / "exporter/demo_model/tokenizer.json"],
        "safetensors": [tmp_path / "made.safetensors"],
        "image": [pictures["rgba.png"], pictures["palette.png"], pictures["plain.jpg"], pictures["progressive.jpg"]],
    }
    for kind, files in corpora.items():
        done = run("probe", "fuzz", kind, "400", str(seed), *files)
        assert done.returncode == 0, (kind, done.stderr[-2000:])


def safetensors() -> bytes:
    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(28)


def rgb_of(kind: str, plane: np.ndarray[Any, Any], width: int, height: int) -> np.ndarray[Any, Any]:
    """What libvtx makes of a buffer whose rows are those of `plane`."""
    done = output("probe", "buffer", kind, str(width), str(height), str(plane.shape[1]), stdin=plane.tobytes())
    return np.frombuffer(done, np.uint8).reshape(height, width, 3)


@pytest.mark.parametrize(("kind", "channels"), [("rgb8", 3), ("bgr8", 3), ("rgba8", 4), ("bgra8", 4), ("gray8", 1)])
def test_buffers_with_a_stride_have_the_pixels_that_arrays_have_in_python(kind: str, channels: int) -> None:
    width, height, gap = 37, 23, 11
    plane = np.random.default_rng(5).integers(0, 256, (height, width * channels + gap), np.uint8)
    array = np.ascontiguousarray(plane[:, : width * channels].reshape(height, width, channels).squeeze())
    want = np.asarray(to_rgb(from_array(bgr(array) if kind.startswith("bgr") else array)))
    np.testing.assert_array_equal(rgb_of(kind, plane, width, height), want)


@pytest.mark.parametrize("kind", ["nv12", "yuyv"])
def test_frames_of_cameras_with_a_stride_have_the_colours_of_bt601(kind: str) -> None:
    width, height, gap = 38, 22, 10
    rows, across = (height * 3 // 2, width) if kind == "nv12" else (height, 2 * width)
    plane = np.random.default_rng(6).integers(0, 256, (rows, across + gap), np.uint8)
    seen = plane[:, :across].astype(float)
    if kind == "nv12":
        luma = seen[:height] - 16
        chroma = seen[height:].reshape(height // 2, width // 2, 2).repeat(2, 0).repeat(2, 1) - 128
    else:
        luma = seen[:, ::2] - 16
        chroma = seen[:, 1::2].reshape(height, width // 2, 2).repeat(2, 1) - 128
    blue, red = chroma[..., 0], chroma[..., 1]
    kr, kb = 0.299, 0.114  # BT.601; 219 and 224 steps of luma and chroma
    r, b = luma * 255 / 219 + red * 255 / 112 * (1 - kr), luma * 255 / 219 + blue * 255 / 112 * (1 - kb)
    g = (luma * 255 / 219 - kr * r - kb * b) / (1 - kr - kb)
    want = np.clip(np.stack([r, g, b], -1), 0, 255)
    assert np.abs(rgb_of(kind, plane, width, height) - want).max() < 2


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 191, 192, 193, 100_003])
def test_sha256_is_that_of_python_with_and_without_instructions(size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    assert output("probe", "sha256", stdin=content).decode().split() == [hashlib.sha256(content).hexdigest()] * 2
