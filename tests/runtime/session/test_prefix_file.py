"""A file of a prompt's beginning: another process does not compute it again, and no file changes an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.exported import Models
from tests.support.families.gemma import GEMMA3, GEMMA4
from tests.support.families.paligemma import PALIGEMMA
from tests.support.families.smolvlm import SMOLVLM
from tests.support.keys import write_keys
from tests.support.prefix_files import DAMAGES, needs_openssl, resealed, sign
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.safetensors import read_header
from vtx.runtime.bundle.seal import PublicKey
from vtx.runtime.errors import ExportError, RequestError

QUESTION, SYSTEM = "How many?", "Be brief, please."
EMPTY = random_image(1)


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(Tiny(context=512), (3,))


def ask(model: Model, file: Path | None, seed: int, k: int | None = None, **more: Any) -> Any:
    with model.open([EMPTY, random_image(seed)], system=SYSTEM, prefix_file=file) as conversation:
        return conversation.ask(QUESTION, k, max_new_tokens=4, ignore_eos=True, **more)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tiny", "k"),
    [(Tiny(context=512), None), (Tiny(context=512), 3), (SMOLVLM, None), (SMOLVLM, 3), (GEMMA4, 3), (GEMMA3, 3)],
    ids=lambda value: getattr(value, "family", value),
)
def test_what_stands_before_the_last_image_comes_from_the_file(
    models: Models, tiny: Tiny, k: int | None, tmp_path: Path
) -> None:
    model, file = models(tiny, (3,)), tmp_path / "shelf.safetensors"
    assert ask(model, file, 2, k).stats.reused_tokens == 0
    written = file.read_bytes()
    answer, wanted = ask(model, file, 3, k), ask(model, None, 3, k)
    assert answer.token_ids == wanted.token_ids
    assert answer.stats.reused_tokens > answer.stats.vision_tokens // 2
    assert answer.stats.kv_slots == wanted.stats.kv_slots
    assert file.read_bytes() == written


def test_a_file_of_another_prompt_is_written_anew(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "shelf.safetensors"
    with model.open([random_image(9), random_image(2)], system=SYSTEM, prefix_file=file) as other:
        other.ask(QUESTION, None, max_new_tokens=1)
    assert ask(model, file, 2).token_ids == ask(model, None, 2).token_ids
    assert ask(model, file, 3).stats.reused_tokens > ask(model, None, 3).stats.vision_tokens // 2


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_or_foreign_file_is_told_and_changes_no_answer(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], said: str
) -> None:
    file = tmp_path / "shelf.safetensors"
    ask(model, file, 2)
    damage(file)
    with caplog.at_level(logging.WARNING, "vtx"):
        assert ask(model, file, 3).token_ids == ask(model, None, 3).token_ids
    assert said in caplog.text
    assert caplog.text.count("\n") <= 2


def test_a_file_without_an_input_of_the_model_is_told(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, file = models(GEMMA4, (3,)), tmp_path / "shelf.safetensors"
    ask(model, file, 2)
    name, *_ = [name for name in read_header(file).tensors if name.startswith("input ")]
    resealed(lambda tensors: tensors.pop(name))(file)
    with caplog.at_level(logging.WARNING, "vtx"):
        assert ask(model, file, 3).token_ids == ask(model, None, 3).token_ids
    assert "does not hold a prompt" in caplog.text


def test_a_full_disk_is_told_and_stops_nothing(model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with patch("vtx.runtime.session.prefix_file.write_safetensors", side_effect=ExportError("cannot write: full")):
        assert ask(model, tmp_path / "shelf", 3).token_ids == ask(model, None, 3).token_ids
    assert "full" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_a_prefix_file_is_refused_where_it_cannot_serve(models: Models, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be continued from some token on"):
        models(PALIGEMMA, (3,)).open(EMPTY, prefix_file=tmp_path / "file")


@needs_openssl
def test_where_bundles_must_be_signed_a_file_needs_a_signature_by_the_same_key_and_none_is_written(
    model: Model, tmp_path: Path, keys: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    file, signed = tmp_path / "shelf.safetensors", replace(model.bundle, key=PublicKey.load(keys[1]))
    wanted = ask(model, None, 3)

    def reused() -> bool:
        caplog.clear()
        with patch.object(model.loaded, "bundle", signed), caplog.at_level(logging.WARNING, "vtx"):
            answer = ask(model, file, 3)
        assert answer.token_ids == wanted.token_ids
        return answer.stats.reused_tokens > answer.stats.vision_tokens // 2

    assert (reused(), file.exists()) == (False, False)
    assert "shelf.safetensors is not written, as it must be signed" in caplog.text
    ask(model, file, 2)
    assert not reused()
    told = f"by {keys[1].name} is required; sign it: openssl pkeyutl -sign -rawin -inkey KEY -in {file.name} -out"
    assert told in caplog.text
    sign(file, keys[0])
    assert reused()
    assert not caplog.text
    for forge in (
        lambda: resealed(lambda tensors: tensors["kv 1"].__setitem__(..., 3))(file),
        lambda: sign(file, write_keys(tmp_path, "theirs", Ed25519PrivateKey.generate())[0]),
        lambda: Path(f"{file}.sig").write_bytes(b"too short"),
    ):
        forge()
        assert not reused()
        assert f"the signature of {file.name} does not fit it and {keys[1].name}: it was altered" in caplog.text
