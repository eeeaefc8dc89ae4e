"""Cards of vtx-fit: defaults where their engine is possible, refused for another bundle, never half written."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.support import bundles
from tests.support.cards import card_of
from tests.support.exported import Models
from tests.support.fixtures import Checkpoints
from tests.support.keys import write_keys
from tests.support.tiny import random_image
from vtx.cli import doctor, run
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.bundle import card as cards
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.card import CARD, read_card, write_card
from vtx.runtime.bundle.seal import PublicKey, SigningKey
from vtx.runtime.errors import BundleError

FASTV = "fastv:k=2,ratio=0.5"


@pytest.fixture
def bundle(models: Models, tmp_path: Path) -> Bundle:
    """Its own default is K = 2 without a reduction."""
    return Bundle.open(bundles.copy(models(reductions=("none", FASTV)).bundle.folder, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_keys(tmp_path_factory.mktemp("keys"), "ours", ed25519.Ed25519PrivateKey.generate())


def test_a_card_has_the_defaults_and_every_option_overrides_them(bundle: Bundle) -> None:
    write_card(bundle.folder, card_of(bundle, 5, FASTV))
    with load(bundle.folder, threads=1) as model, model.open(random_image(0)) as image:
        assert model.loaded.card is not None
        assert (model.backend.device, model.backend.compute) == ("cpu", "f32")
        fitted = image.ask("red?", max_new_tokens=1).stats
        assert (fitted.k, fitted.reduce) == (5, FASTV)
        other = image.ask("red?", 3, reduce="none", max_new_tokens=1).stats
        assert (other.k, other.reduce) == (3, "none")


def test_the_full_model_may_be_the_choice_of_a_bundle_with_another_default(bundle: Bundle) -> None:
    assert bundle.manifest.default_k == 2
    write_card(bundle.folder, card_of(bundle, None, "none"))
    with load(bundle.folder, device="cpu", threads=1) as model, model.open(random_image(0)) as image:
        assert image.ask("red?", max_new_tokens=1).stats.k is None


@pytest.mark.parametrize(
    ("device", "compute", "asked", "reason"),
    [("cuda", "f32", "auto", "cuda"), ("npu", "f4", "auto", "unknown"), ("openvino", "f32", "cpu", "was asked for")],
)
def test_a_card_for_another_engine_is_ignored_with_a_message(
    bundle: Bundle, device: str, compute: str, asked: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_card(bundle.folder, card_of(bundle, 5, FASTV, device, compute))
    with caplog.at_level(logging.WARNING, "vtx"), load(bundle.folder, device=asked, threads=1) as model:
        assert model.loaded.card is None
        assert model.loaded.defaults.k == 2
    assert "card.json" in caplog.text
    assert "ignored" in caplog.text
    assert reason in caplog.text


@pytest.mark.slow
def test_run_says_it_in_one_line_and_doctor_prints_it(bundle: Bundle, tmp_path: Path) -> None:
    write_card(bundle.folder, card_of(bundle, 5, FASTV))
    random_image(0).save(tmp_path / "a.png")
    asked = [str(tmp_path / "a.png"), "red?", "--bundle", str(bundle.folder), "--max-new-tokens", "1", "--threads", "1"]
    said = CliRunner().invoke(run, asked)
    assert said.exit_code == 0, said.output
    assert f"card.json of vtx-fit: K = 5, {FASTV}, f32 on cpu; at most 2% of the answers change" in said.stderr
    checked = CliRunner().invoke(doctor, [str(bundle.folder)])
    assert checked.exit_code == 0, checked.output
    assert "questions.jsonl" in checked.stdout
    assert "another processor" in checked.stderr
    assert '"card": {"format": "vtx-card-1"' in CliRunner().invoke(doctor, [str(bundle.folder), "--json"]).stdout


def test_a_card_of_another_manifest_is_refused(bundle: Bundle) -> None:
    write_card(bundle.folder, card_of(bundle, 5, FASTV))
    changed = bundles.manifest(bundle.folder)
    changed["record"] = {"another": "export"}
    bundles.write_manifest(bundle.folder, changed)
    with pytest.raises(BundleError, match=r"was made for another vtx\.json"):
        load(bundle.folder, device="cpu")


def test_an_altered_card_is_refused(bundle: Bundle) -> None:
    write_card(bundle.folder, card_of(bundle, 5, FASTV))
    path = bundle.folder / CARD
    path.write_text(path.read_text().replace('"k": 5', '"k": 2'))
    with pytest.raises(BundleError, match=r"card\.json was altered"):
        load(bundle.folder, device="cpu")
    write_card(bundle.folder, dataclasses.replace(card_of(bundle, 5, FASTV), format="vtx-card-9"))
    with pytest.raises(BundleError, match="format 'vtx-card-9'"):
        read_card(bundle)


@pytest.mark.slow
def test_a_card_of_a_signed_bundle_must_be_signed_by_the_same_key(
    tiny_checkpoint: Checkpoints, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    plan = plan_export(ExportOptions(str(tiny_checkpoint()), (3,), "fp32", dialects=("ort",)))
    signing = SigningKey.load(keys[0])
    folder = run_export(plan, tmp_path / "signed", force=False, report=bundles.IGNORE, sign=signing).folder
    bundle = Bundle.open(folder, key=PublicKey.load(keys[1]))
    write_card(folder, card_of(bundle, 3, "none"))
    with pytest.raises(BundleError, match=r"card\.json .* is not signed"):
        read_card(bundle)
    write_card(folder, card_of(bundle, 3, "none"), signing)
    assert read_card(bundle) == card_of(bundle, 3, "none")
    assert read_card(Bundle.open(folder)) is not None  # without a key nobody asks for the signature


@pytest.mark.parametrize("before", [False, True])
def test_a_card_interrupted_anywhere_is_whole_or_absent(
    bundle: Bundle, before: bool, monkeypatch: pytest.MonkeyPatch, keys: tuple[Path, Path]
) -> None:
    """Each change of the folder in turn is the one at which the process ends."""
    old, new, key = card_of(bundle, 3, "none"), card_of(bundle, 5, FASTV), SigningKey.load(keys[0])
    signed = Bundle(bundle.folder, bundle.manifest, PublicKey.load(keys[1]))
    steps, ended = 0, True
    while ended:
        with monkeypatch.context() as patched:
            (bundle.folder / CARD).unlink(missing_ok=True)
            if before:
                write_card(bundle.folder, old, key)
            left, steps = steps, steps + 1

            def dying(call: Callable[..., None]) -> Callable[..., None]:
                def step(*args: object, **named: object) -> None:
                    nonlocal left
                    if not left:
                        raise KeyboardInterrupt
                    left -= 1
                    call(*args, **named)

                return step

            patched.setattr(Path, "unlink", dying(Path.unlink))
            patched.setattr(Path, "replace", dying(Path.replace))
            patched.setattr(os, "fsync", dying(os.fsync))
            try:
                cards.write_card(bundle.folder, new, key)
                ended = False
            except KeyboardInterrupt:
                ended = True
        assert read_card(signed) in ((None, new, old) if before else (None, new))
    assert read_card(signed) == new
    assert steps > 6
