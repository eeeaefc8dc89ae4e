"""Prefix files of libvtx are Python's, each reads the other's, and no file changes an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cabi import BUNDLE, REQUEST, Frames, Loaded
from tests.support.cpp import DEVICES, needs_abi, needs_cpp
from tests.support.exported import Models
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.qwen import QWEN3, QWEN25
from tests.support.families.smolvlm import SMOLVLM
from tests.support.fixtures import Checkpoints
from tests.support.keys import export_signed
from tests.support.prefix_files import DAMAGES, needs_openssl, sign
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.safetensors import read_bits, read_header
from vtx.runtime.errors import BundleError
from vtx.runtime.session.prefix_file import check_prefix

pytestmark = [
    needs_cpp,
    needs_abi,
    pytest.mark.dialects("ort", "plain"),
]
QUESTION, SYSTEM = "How many?", "Be brief, please."


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny(context=512), (3,))


@pytest.fixture(scope="module")
def loaded(model: Model) -> Iterator[Loaded]:
    with closing(Loaded(model.bundle.folder, "cpu")) as loaded:
        yield loaded


def frames(loaded: Loaded, seed: int) -> Frames:
    return Frames(loaded, [np.asarray(random_image(1)), np.asarray(random_image(seed))], SYSTEM)


def ask(conversation: Frames, k: int | None = None) -> dict[str, Any]:
    return conversation.ask(QUESTION, k=str(k or "none").encode(), ignore_eos=1, max_new_tokens=4)


def in_python(model: Model, file: Path | None, seed: int, k: int | None) -> dict[str, Any]:
    with model.open([random_image(1), random_image(seed)], system=SYSTEM, prefix_file=file) as conversation:
        return dict(conversation.ask(QUESTION, k, max_new_tokens=4, ignore_eos=True).to_dict())


@pytest.mark.sampled
@DEVICES
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize(
    "tiny", [Tiny(context=512), SMOLVLM, *(replace(tiny, context=512) for tiny in (QWEN25, QWEN3, GEMMA3, GEMMA4))],
    ids=lambda tiny: tiny.family,
)  # fmt: skip
def test_each_runtime_reads_what_the_other_wrote(
    models: Models, tiny: Tiny, k: int | None, device: str, tmp_path: Path
) -> None:
    folder, ours, theirs = models(tiny, (3,)).bundle.folder, tmp_path / "cpp", tmp_path / "python"
    with closing(Loaded(folder, device)) as loaded, load(folder, device=device, threads=1) as model:
        with closing(frames(loaded, 2)) as first:
            assert ask(first, k)["reused_tokens"] == 0
            assert first.save_prefix(ours) == ""
        in_python(model, theirs, 2, k)
        assert_files_equal(ours, theirs)
        wanted = in_python(model, None, 3, k)
        found = in_python(model, ours, 3, k)
        with closing(frames(loaded, 3)) as second:
            assert second.load_prefix(theirs) == ""
            answer = ask(second, k)
        assert list(answer["token_ids"]) == list(found["token_ids"]) == list(wanted["token_ids"])
        # Without K an image of Gemma 4 runs again: its states of the layers without K and V of their own are not kept.
        least = 0 if tiny.family == "gemma4" and k is None else answer["vision_tokens"] // 2
        assert answer["reused_tokens"] == found["reused_tokens"] > least
        assert list(answer["kv_slots"]) == list(wanted["kv_slots"])


def assert_files_equal(ours: Path, theirs: Path) -> None:
    mine, other = read_header(ours), read_header(theirs)
    assert mine.tensors.keys() == other.tensors.keys()
    for name, info in mine.tensors.items():
        want = other.tensors[name]
        assert (info.dtype, info.shape) == (want.dtype, want.shape), name
        given, wanted = read_bits(info), read_bits(want)
        if given.dtype in (np.float16, np.float32):
            np.testing.assert_allclose(given.astype(np.float32), wanted.astype(np.float32), atol=1e-4, err_msg=name)
        elif not name.startswith("kv"):
            assert np.array_equal(given, wanted), name
    assert {**mine.metadata, "sha256": ""} == {**other.metadata, "sha256": ""}


def test_a_file_of_another_prompt_serves_what_both_begin_with(loaded: Loaded, tmp_path: Path) -> None:
    with closing(Frames(loaded, [np.asarray(random_image(9)), np.asarray(random_image(2))], SYSTEM)) as other:
        ask(other)
        assert other.save_prefix(tmp_path / "file") == ""
    with closing(frames(loaded, 2)) as mine, closing(frames(loaded, 2)) as fresh:
        assert mine.load_prefix(tmp_path / "file") == ""
        answer, wanted = ask(mine), ask(fresh)
    assert answer["token_ids"] == wanted["token_ids"]
    assert 0 < answer["reused_tokens"] < answer["prompt_tokens"] - answer["vision_tokens"], "text alone"


def test_a_file_is_written_only_where_it_lacks_something(loaded: Loaded, tmp_path: Path) -> None:
    file, inodes = tmp_path / "shelf.safetensors", list[int]()
    for first in (1, 1, 9, 9):
        with closing(Frames(loaded, [np.asarray(random_image(first)), np.asarray(random_image(2))], SYSTEM)) as shown:
            assert not inodes or shown.load_prefix(file) == ""
            ask(shown)
            assert shown.save_prefix(file) == ""
            inodes.append(file.stat().st_ino)
            shown.replace([np.asarray(random_image(first)), np.asarray(random_image(3))])
            assert ask(shown)["reused_tokens"] > ask(shown)["vision_tokens"] // 2
            assert shown.save_prefix(file) == ""
            assert file.stat().st_ino == inodes[-1], "it has all of it"
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_or_foreign_file_is_refused_by_name_and_changes_no_answer(
    loaded: Loaded, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    file = tmp_path / "shelf.safetensors"
    with closing(frames(loaded, 2)) as first:
        ask(first)
        assert first.save_prefix(file) == ""
    damage(file)
    with closing(frames(loaded, 3)) as second, closing(frames(loaded, 3)) as fresh:
        problem = second.load_prefix(file)
        assert problem.startswith(f"{BUNDLE} ")
        assert file.name in problem
        assert said.replace("bytes, of this bundle at most", "the limit for such a file") in problem
        answer = ask(second)
        assert answer["token_ids"] == ask(fresh)["token_ids"]
        assert answer["reused_tokens"] == 0


def test_a_file_that_cannot_be_read_or_written_is_told(loaded: Loaded, tmp_path: Path) -> None:
    with closing(frames(loaded, 2)) as conversation:
        assert "No such file" in conversation.load_prefix(tmp_path / "file")
        assert "the caches do not hold what stands before" in conversation.save_prefix(tmp_path / "file")
        ask(conversation)
        assert "a question has been asked already" in conversation.load_prefix(tmp_path / "file")
        (tmp_path / "full" / "folder").mkdir(parents=True)
        for file in (tmp_path / "missing/file", tmp_path / "full"):
            problem = conversation.save_prefix(file)
            assert problem.startswith(f"{REQUEST} cannot write {file}: ")
        assert conversation.ask(QUESTION)["reused_image"], "it goes on"
    assert [path.name for path in tmp_path.iterdir()] == ["full"], "nothing is left of what was not written"


def test_a_prefix_file_is_refused_where_it_cannot_serve(models: Models, tmp_path: Path) -> None:
    both_ways = models(PALIGEMMA, (3,))
    with closing(Loaded(both_ways.bundle.folder, "cpu")) as loaded, closing(Frames(loaded, [])) as conversation:
        for problem in (conversation.load_prefix(tmp_path / "file"), conversation.save_prefix(tmp_path / "file")):
            assert "cannot be continued from some token on" in problem


@needs_openssl
def test_where_bundles_must_be_signed_a_file_needs_a_signature_by_the_same_key_and_none_is_written(
    tiny_checkpoint: Checkpoints, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    options = ExportOptions(str(tiny_checkpoint(Tiny(context=512))), (3,), "fp32")
    folder, file = export_signed(options, tmp_path / "signed", keys[0]), tmp_path / "shelf.safetensors"
    with load(folder, device="cpu", threads=1) as free:
        in_python(free, file, 2, None)
    with closing(Loaded(folder, "cpu", key=keys[1])) as loaded, load(folder, require_signature=keys[1]) as model:

        def refused() -> bool:
            """Both runtimes must refuse the file in the same words, or neither."""
            said = ""
            try:
                check_prefix(file, model.bundle, model.backend)
            except BundleError as e:
                said = f"{BUNDLE} {e}"
            with closing(frames(loaded, 3)) as conversation:
                assert conversation.load_prefix(file) == said
                answer = ask(conversation)
            assert (answer["reused_tokens"] > answer["vision_tokens"] // 2) == (not said)
            return bool(said)

        assert refused()
        sign(file, keys[0])
        assert not refused()
        Path(f"{file}.sig").write_bytes(Path(f"{file}.sig").read_bytes()[::-1])
        assert refused()
        with closing(frames(loaded, 3)) as conversation:
            ask(conversation)
            said = conversation.save_prefix(tmp_path / "other")
        assert not (tmp_path / "other").exists()
    assert said.startswith(
        f"{REQUEST} other is not written, as it must be signed, and the key that signs is not here; "
    )
    assert said.endswith(
        "where no signature is required, and sign it: openssl pkeyutl -sign -rawin -inkey KEY -in other -out other.sig"
    )
