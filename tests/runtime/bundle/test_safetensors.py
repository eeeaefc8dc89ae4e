from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import vtx.runtime.bundle.safetensors as subject
from vtx.runtime.bundle import files
from vtx.runtime.bundle.files import read_named
from vtx.runtime.bundle.safetensors import (
    DTYPES,
    layout,
    parse_json,
    read_bits,
    read_header,
    read_tensor,
    widen_bf16,
    write_safetensors,
)
from vtx.runtime.errors import BundleError, CheckpointError, ExportError


def entry(dtype: object = "U8", shape: object = (1,), offsets: object = (0, 1)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_bytes(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def put(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


# What is read


def test_the_reader_agrees_with_the_library_about_names_dtypes_shapes_and_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b.c": rng.standard_normal((2, 1, 5)).astype(np.float16),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.int64),
        "flags": np.array([True, False]),
        "bytes": np.arange(5, dtype=np.uint8),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors", {"format": "np"})
    header = read_header(tmp_path / "m.safetensors")
    assert header.metadata == {"format": "np"}
    assert set(header.tensors) == set(arrays)
    for name, array in arrays.items():
        found = read_tensor(header.tensors[name])
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    arrays = {
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "big_endian": np.arange(4, dtype=">f4"),
        "scalar": np.array(7, np.int32),
        "ü": np.ones((2, 0), np.float16),
    }
    write_safetensors(tmp_path / "m.safetensors", arrays, {"key": "wörd"})
    found = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)
    assert read_header(tmp_path / "m.safetensors").metadata == {"key": "wörd"}
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_bf16_is_read_as_its_bits_or_as_float32(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)  # 1, -2, inf, the smallest subnormal
    info = read_header(put(tmp_path, file_bytes({"x": entry("BF16", [4], [0, 8])}, bits.tobytes()))).tensors["x"]
    np.testing.assert_array_equal(read_bits(info), bits)
    assert read_tensor(info).tolist() == [1.0, -2.0, np.inf, 2.0**-133]
    assert widen_bf16(bits.reshape(2, 2)).shape == (2, 2)


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(2, 99), slice(3, 3), [3, 0, 3], []], ids=str)
def test_rows_are_read_as_numpy_indexes_them(tmp_path: Path, rows: Any) -> None:
    arrays = {"flat": np.arange(4, dtype=np.int64), "wide": np.arange(24, dtype=np.float16).reshape(4, 2, 3)}
    write_safetensors(tmp_path / "m.safetensors", {**arrays, "none": np.ones((4, 0), np.float32)})
    tensors = read_header(tmp_path / "m.safetensors").tensors
    rows = np.array(rows, np.int64) if isinstance(rows, list) else rows
    for name, array in arrays.items():
        np.testing.assert_array_equal(read_bits(tensors[name], rows), array[rows])
        assert read_bits(tensors[name], rows).flags.writeable
    assert read_bits(tensors["none"], rows).shape == np.ones((4, 0))[rows].shape


def test_a_number_without_axes_is_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"x": np.array(7, np.int32)})
    assert read_bits(read_header(tmp_path / "m.safetensors").tensors["x"]).tolist() == 7


def test_a_tensor_at_an_odd_offset_reads_right(tmp_path: Path) -> None:
    values = np.array([1.5, -2.5], np.float32)
    header = {"a": entry(), "x": entry("F32", [2], [1, 9])}
    info = read_header(put(tmp_path, file_bytes(header, b"\x01" + values.tobytes()))).tensors["x"]
    np.testing.assert_array_equal(read_tensor(info), values)


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"late": entry(offsets=[1, 2]), "early": entry()}
    assert list(read_header(put(tmp_path, file_bytes(header, b"xy"))).tensors) == ["early", "late"]


@pytest.mark.parametrize("dtype", [name for name, (_, stored) in DTYPES.items() if stored is None])
def test_a_dtype_numpy_lacks_is_listed_but_not_read(tmp_path: Path, dtype: str) -> None:
    nbytes = DTYPES[dtype][0]
    info = read_header(put(tmp_path, file_bytes({"x": entry(dtype, [8], [0, nbytes])}, bytes(nbytes)))).tensors["x"]
    assert info.dtype == dtype
    with pytest.raises(CheckpointError, match=f"'x' in model.safetensors is {dtype}"):
        read_tensor(info)


def test_a_layout_lets_tensors_be_streamed_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header, places = layout(path, [("w", "F16", (2, 3)), ("b", "BF16", (1,))], {"a": "b"})
    assert len(header) % 64 == 0
    assert [(p.offset, p.nbytes) for p in places] == [(len(header), 12), (len(header) + 12, 2)]
    path.write_bytes(header + bytes(14))
    assert list(read_header(path).tensors.values()) == places


@pytest.mark.parametrize("length", range(1, 70))
def test_the_data_always_begins_at_a_multiple_of_64(length: int) -> None:
    header, _ = layout(Path("m"), [("x" * length, "U8", (1,))])
    assert len(header) % 64 == 0


def test_a_layout_refuses_our_own_mistakes() -> None:
    with pytest.raises(ValueError, match="duplicated"):
        layout(Path("m"), [("a", "U8", ()), ("a", "U8", ())])
    with pytest.raises(ValueError, match="reserved"):
        layout(Path("m"), [("__metadata__", "U8", ())])
    with pytest.raises(ValueError, match="'FLOAT'"):
        layout(Path("m"), [("a", "FLOAT", ())])
    with pytest.raises(ValueError, match="no dtype for numpy's"):
        write_safetensors(Path("m"), {"a": np.array(["text"])})


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ExportError, match="No space left on device"):
        write_safetensors(path, {"x": np.ones(3)})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"model.safetensors": b"old"}


def test_a_write_into_no_directory_is_an_export_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot write"):
        write_safetensors(tmp_path / "none" / "m.safetensors", {"x": np.ones(3)})
    with pytest.raises(ExportError, match="cannot write"):
        write_safetensors(put(tmp_path, b"") / "m.safetensors", {"x": np.ones(3)})


# What is refused

GOOD = file_bytes({"x": entry("F32", [2], [0, 8])}, bytes(8))

BAD_FILES = {
    "nothing": (b"", "holds 0 bytes"),
    "seven bytes": (b"\x01" * 7, "holds 7 bytes"),
    "an absurd header length": (b"\xff" * 16, "header of 18,446,744,073,709,551,615 bytes"),
    "a header longer than the limit": (struct.pack("<Q", 2**23 + 1) + bytes(64), "at most 8,388,608"),
    "a header beyond the file": (struct.pack("<Q", 100) + b"{}", "holds 10 bytes and announces a header of 100"),
    "a header of no length": (bytes(8), "a header of 0"),
    "a pickle": (b"\x80\x02}q\x00X\x05\x00\x00\x00abcde.", "not a safetensors file"),
    "no UTF-8": (file_bytes(b'{"\xff": 1}'), "not UTF-8"),
    "UTF-16": (file_bytes('{"a": 1}'.encode("utf-16")), "not UTF-8"),
    "no JSON": (file_bytes(b"{'a': 1}"), "not sound JSON"),
    "two documents": (file_bytes(b"{}{}"), "not sound JSON"),
    "an array": (file_bytes([]), "the header of model.safetensors is not an object"),
    "a number": (file_bytes(3), "the header of model.safetensors is not an object"),
    "nested lists": (file_bytes(b"[" * 100_000), "nested deeper than the limit of 64"),
    "nested objects": (file_bytes(b'{"a":' * 100_000), "nested deeper than the limit of 64"),
    "nesting that Python bears": (file_bytes(b"[" * 65 + b"]" * 65), "nested deeper than the limit of 64"),
    "a name twice": (file_bytes(b'{"a": {}, "b": 1, "a": {}}'), "'a' is duplicated"),
    "a key twice": (file_bytes(b'{"a": {"shape": [1], "shape": [2]}}'), "'shape' is duplicated"),
    "a huge integer": (file_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "not sound JSON"),
    "half a surrogate": (file_bytes(rb'{"\ud800": 1}'), "not sound JSON"),
    "metadata that is a list": (file_bytes({"__metadata__": ["a"]}), "table of strings"),
    "metadata with a number": (file_bytes({"__metadata__": {"a": 1}}), "table of strings"),
    "a tensor that is a list": (file_bytes({"x": ["U8", [1], [0, 1]]}, b"x"), "not described"),
    "an empty description": (file_bytes({"x": {}}), "dtype 'None'"),
    "an unknown dtype": (file_bytes({"x": entry("Q4_K")}, b"x"), "dtype 'Q4_K'"),
    "a dtype that is a list": (file_bytes({"x": entry(["U8"])}, b"x"), "does not know"),
    "a shape of text": (file_bytes({"x": entry(shape="1")}, b"x"), "no valid shape"),
    "a shape of floats": (file_bytes({"x": entry(shape=[1.0])}, b"x"), "no valid shape"),
    "a shape of bools": (file_bytes({"x": entry(shape=[True])}, b"x"), "no valid shape"),
    "a shape of NaN": (file_bytes({"x": entry(shape=[float("nan")])}, b"x"), "NaN is not JSON"),
    "a shape of Infinity": (file_bytes({"x": entry(shape=[float("-inf")])}, b"x"), "-Infinity is not JSON"),
    "a negative shape": (file_bytes({"x": entry(shape=[-1, -1])}, b"x"), "no valid shape"),
    "a shape beyond 64 bits": (file_bytes({"x": entry(shape=[2**64])}, b"x"), "no valid shape"),
    "33 dimensions": (file_bytes({"x": entry(shape=[1] * 33)}, b"x"), "at most 32"),
    "a product beyond 64 bits": (file_bytes({"x": entry(shape=[2**32, 2**32])}, b"x"), "more bytes than any file"),
    "an empty product beyond": (file_bytes({"x": entry(shape=[0, 2**62, 4], offsets=[0, 0])}), "more bytes than any"),
    "half a byte": (file_bytes({"x": entry("F4", [3])}, b"x"), "not a whole number of bytes"),
    "one offset": (file_bytes({"x": entry(offsets=[0])}, b"x"), "no valid data_offsets"),
    "three offsets": (file_bytes({"x": entry(offsets=[0, 1, 2])}, b"x"), "no valid data_offsets"),
    "reversed offsets": (file_bytes({"x": entry(offsets=[1, 0])}, b"x"), "no valid data_offsets"),
    "negative offsets": (file_bytes({"x": entry(offsets=[-1, 0])}, b"x"), "no valid data_offsets"),
    "offsets of bools": (file_bytes({"x": entry(offsets=[False, True])}, b"x"), "no valid data_offsets"),
    "offsets unlike the shape": (file_bytes({"x": entry("F32", [2], [0, 4])}, bytes(4)), "has 4 bytes.* need 8"),
    "overlapping ones": (file_bytes({"x": entry("U16", [1], [0, 2]), "y": entry(offsets=[1, 2])}, b"xy"), "overlaps"),
    "one tensor in two": (file_bytes({"x": entry(), "y": entry()}, b"x"), "'y'.* overlaps"),
    "a gap": (file_bytes({"x": entry(), "y": entry(offsets=[2, 3])}, b"x_y"), "'y'.* leaves a gap"),
    "a gap in front": (file_bytes({"x": entry(offsets=[1, 2])}, b"_x"), "'x'.* leaves a gap"),
    "a truncated file": (GOOD[:-3], f"holds {len(GOOD) - 3} bytes, its header says {len(GOOD)}; download it again"),
    "bytes behind": (GOOD + b"xyz", "holds 3 bytes after its last tensor"),
    "bytes and no tensor": (file_bytes({}, b"x"), "holds 1 bytes after its last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(put(tmp_path, content))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_the_caller_chooses_the_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        read_header(put(tmp_path, b""), error=BundleError)


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, file_bytes({str(i): entry(shape=[0], offsets=[0, 0]) for i in range(11)}))
    assert len(read_header(path).tensors) == 11
    monkeypatch.setattr(subject, "MAX_TENSORS", 10)
    with pytest.raises(CheckpointError, match="lists 11 tensors, vtx reads at most 10"):
        read_header(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="a device or a pipe"):
        read_header(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="a device or a pipe"):
        read_header(Path("/dev/zero"))
    with pytest.raises(CheckpointError, match="is a directory"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"null (byte|character)"):
        read_header(Path("a\0b"))


def test_no_permission_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, GOOD)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "open", denied)  # chmod does not keep root out
    with pytest.raises(CheckpointError, match="Permission denied"):
        read_header(path)


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, GOOD)
    info = read_header(path).tensors["x"]
    path.write_bytes(GOOD[:-4])
    with pytest.raises(CheckpointError, match="was replaced or written to since its header was read"):
        read_bits(info)
    path.unlink()
    with pytest.raises(BundleError, match="No such file"):
        read_tensor(info, error=BundleError)


def test_a_long_or_unprintable_name_does_not_spoil_the_message(tmp_path: Path) -> None:
    path = put(tmp_path, file_bytes({"\n\x1b[31m" + "x" * 10_000: entry("no")}, b"x"))
    with pytest.raises(CheckpointError, match=r"'\\n\\x1b") as caught:
        read_header(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_small_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    assert read_named(put(tmp_path, b"12345"), 5, error=CheckpointError) == b"12345"
    with pytest.raises(CheckpointError, match="holds 5 bytes, the limit for such a file is 4"):
        read_named(tmp_path / "model.safetensors", 4, error=CheckpointError)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" + b"9" * 5000 + b"]", "value has 5000 digits"),
        (rb'["\ud800"]', r"'\ud800' is half of a surrogate pair"),
    ],
)
def test_what_is_wrong_with_json_is_told_in_its_own_words(content: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_json(content, "it")
    assert str(caught.value).endswith(reason)


def test_sound_json_is_parsed() -> None:
    assert parse_json(b'{"a": [1, 2.5, null], "\\u00fc": "\\ud83d\\ude00"}', "it") == {"a": [1, 2.5, None], "ü": "😀"}
    assert parse_json(b"[" * 64 + b"]" * 64, "it")
