"""vtx-export --text-tower: what goes into the bundle, what it costs, and which CLIPs and bundles are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import bundles
from tests.support.bundles import export_with
from tests.support.clip import WIDTH, make_clip
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints, References
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny, random_image
from vtx.exporter.bundling.export import key_of
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.bundle.safetensors import read_tensor
from vtx.runtime.bundle.vtx_json import remake_advice
from vtx.runtime.errors import BundleError, CheckpointError, RequestError, UnsupportedModelError, VtxError

SPEC = "cdpruner:keep=4,text=tower"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory, reference: References) -> Path:
    return make_clip(tmp_path_factory.mktemp("clip") / "clip", reference())


@pytest.fixture(scope="module")
def options(tiny_checkpoint: Checkpoints, clip: Path) -> ExportOptions:
    return ExportOptions(str(tiny_checkpoint()), (3,), "fp32", reductions=("none", SPEC), text_tower=str(clip))


@pytest.fixture(scope="module")
def bundle(options: ExportOptions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_with(options, tmp_path_factory.mktemp("bundle") / "b").folder


# ---- what is in the bundle -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_manifest_declares_tower_graph_and_tokenizer_in_every_dialect(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    tower = manifest.text_tower
    assert tower is not None
    assert (tower.layers, tower.hidden, tower.width, tower.max_tokens, tower.end_id) == (3, 24, WIDTH, 14, None)
    assert (bundle / tower.tokenizer).is_file()
    declared = read_json(bundle / "vtx.json")["interface"]["dialects"]
    for dialect, graphs in manifest.dialects.items():
        assert graphs.text_tower == f"text-tower.{dialect}.onnx"
        assert declared[dialect]["text_tower"]["outputs"] == {
            "text_embedding": {"dtype": "float32", "shape": [1, WIDTH]}
        }
        assert declared[dialect]["vision"]["outputs"]["clip_patches"]["shape"] == ["tokens", WIDTH]


def test_a_pickled_text_tower_is_read_where_the_user_allows_it(
    options: ExportOptions, clip: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(clip, tmp_path / "clip")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    pickled = replace(options, text_tower=str(folder))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.* is not opened; .*--allow-pickle"):
        plan_export(pickled)
    found, known = (plan_export(o).text_tower for o in (replace(pickled, allow_pickle=True), options))
    assert found is not None
    assert known is not None
    assert found.spec == known.spec
    assert set(found.checkpoint.tensors) == set(known.checkpoint.tensors)
    for name, info in known.checkpoint.tensors.items():
        np.testing.assert_array_equal(read_tensor(found.checkpoint.tensors[name]), read_tensor(info))


def test_without_the_option_a_bundle_has_no_trace_of_it(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = bundles.export_all(tiny_checkpoint(), tmp_path / "b").folder
    assert Bundle.open(folder).manifest.text_tower is None
    assert not [path.name for path in folder.iterdir() if "text-tower" in path.name or "text_tower" in path.name]
    declared = read_json(folder / "vtx.json")["interface"]["dialects"]["ort"]
    assert "text_tower" not in declared
    assert "clip_patches" not in declared["vision"]["outputs"]


def test_the_prediction_counts_the_tower(options: ExportOptions, bundle: Path) -> None:
    plan, without = plan_export(options), plan_export(replace(options, text_tower=None, reductions=()))
    weights = sum(w.nbytes for name, w in plan.weights.stored.items() if name.startswith("clip."))
    assert weights > 0
    assert plan.prediction.run_memory - without.prediction.run_memory == weights
    assert plan.prediction.disk - without.prediction.disk > weights
    assert plan.prediction.work > without.prediction.work
    on_disk = sum(record.bytes for record in Bundle.open(bundle).manifest.files.values())
    assert plan.prediction.disk == pytest.approx(on_disk, rel=0.3)


def test_int8_bundles_answer_by_it_as_well(options: ExportOptions, tmp_path: Path) -> None:
    made = export_with(replace(options, precision="int8"), tmp_path / "b")
    with load(made.folder, threads=THREADS) as model, model.open(random_image(1)) as image:
        stats = image.ask("red?", max_new_tokens=1, reduce=SPEC).stats
    assert stats.vision_tokens == 4


def test_another_tower_at_the_same_path_is_another_export(
    options: ExportOptions, clip: Path, tmp_path: Path, reference: References
) -> None:
    there, other = bundles.copy(clip, tmp_path / "clip"), make_clip(tmp_path / "other", reference(), seed=1)
    asked = replace(options, text_tower=str(there))
    before = key_of(plan_export(asked))
    assert key_of(plan_export(asked)) == before
    shutil.rmtree(there)
    other.rename(there)
    assert key_of(plan_export(asked)) != before


def test_the_command_that_makes_it_again_names_the_tower(bundle: Path, clip: Path) -> None:
    manifest = read_json(bundle / "vtx.json")
    assert f"--text-tower {clip}" in remake_advice(manifest, "b")


def test_a_tower_that_was_trained_on_is_warned_of(
    options: ExportOptions, tmp_path: Path, reference: References
) -> None:
    trained = make_clip(tmp_path / "trained", reference(Tiny(), 1))
    [warning] = plan_export(replace(options, text_tower=str(trained))).warnings
    assert "the vision tower differs from the one in" in warning
    assert "approximate" in warning


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_the_form_is_refused_where_no_tower_is_given(options: ExportOptions) -> None:
    with pytest.raises(RequestError, match=r"text=tower needs CLIP's text tower.*--text-tower CLIP, or use text=embed"):
        plan_export(replace(options, text_tower=None))


def test_a_bundle_without_it_says_what_to_use_instead(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = bundles.export_all(tiny_checkpoint(), tmp_path / "b").folder
    with (
        load(folder, threads=THREADS) as model,
        model.open(random_image(1)) as image,
        pytest.raises(RequestError, match=r"lacks CLIP's text tower; export it with .* or use text=embedding"),
    ):
        image.ask("red?", reduce=SPEC)


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (Tiny(vision="siglip"), "a siglip vision tower has no CLIP text tower"),
        (Tiny(feature_layer=(-3, -2)), "projects the hidden states of one layer, and this model uses 2"),
        (Tiny(vision_hidden=48, vision_heads=4), "its vision tower has hidden size 32, the LLaVA's has 48"),
    ],
    ids=["siglip", "two-feature-layers", "another-width"],
)
def test_a_llava_that_it_does_not_fit_is_refused(
    tiny_checkpoint: Checkpoints, options: ExportOptions, tiny: Tiny, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        plan_export(replace(options, model=str(tiny_checkpoint(tiny))))


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = read_json(path)
        for key, value in changes.items():
            part, _, name = key.rpartition("__")
            (config[part] if part else config)[name] = value
        write_json(path, config)

    return change


def _tokenizer(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        write_json(path, {**read_json(path), **changes})

    return change


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


GROWING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 3,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (_config(model_type="clip_text_model"), UnsupportedModelError, "lacks the projections"),
        (_config(model_type="siglip"), UnsupportedModelError, "needs the whole CLIPModel"),
        (_config(text_config__num_hidden_layers=10**6), CheckpointError, "num_hidden_layers is 1000000, not .* 512"),
        (_config(text_config__num_attention_heads=5), CheckpointError, "attention heads .5.|with 5 heads"),
        (_config(text_config__max_position_embeddings=10**6), CheckpointError, "1000000 tokens: sizes"),
        (_config(text_config__vocab_size=10), CheckpointError, "vocab|tokens"),
        (_config(text_config__hidden_size=16), CheckpointError, "config.json needs"),
        (_config(text_config__layer_norm_eps="x"), CheckpointError, "CLIP|layer_norm_eps"),
        (_config(projection_dim=7), CheckpointError, "config.json needs"),
        (_remove("tokenizer.json"), CheckpointError, "has no tokenizer.json"),
        (_remove("model.safetensors"), CheckpointError, "holds neither model.safetensors"),
        (_tokenizer(normalizer=GROWING), CheckpointError, "normalizer makes up to"),
        (_tokenizer(model="nothing"), CheckpointError, "tokenizer"),
    ],
    ids=[
        "text-model-only", "siglip", "layers", "heads", "positions", "vocabulary", "hidden", "eps", "projection",
        "no-tokenizer", "no-weights", "growing-normalizer", "no-model",
    ],
)  # fmt: skip
def test_hostile_and_unfit_clips_are_refused_in_one_line(
    options: ExportOptions,
    clip: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    kind: type[VtxError],
    message: str,
) -> None:
    folder = Path(shutil.copytree(clip, tmp_path / "clip"))
    damage(folder)
    with pytest.raises(kind, match=message) as found:
        plan_export(replace(options, text_tower=str(folder)))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("width", 0, "text_tower.width is 0, outside"),
        ("max_tokens", 1 << 20, "sizes are inconsistent"),
        ("heads", 5, "sizes are inconsistent"),
        ("eps", -1.0, "text_tower.eps is -1.0"),
        ("end_id", -3, "text_tower.end_id is -3, outside"),
        ("tokenizer", "nowhere.json", "'nowhere.json' has no checksum"),
        ("tokenizer", "../tokenizer.json", "has no checksum"),
    ],
)
def test_a_forged_tower_is_refused(bundle: Path, tmp_path: Path, key: str, value: Any, message: str) -> None:
    folder = bundles.copy(bundle, tmp_path / "b")
    manifest = bundles.manifest(folder)
    manifest["text_tower"][key] = value
    bundles.forge(folder, manifest)
    with pytest.raises(BundleError, match=message):
        Bundle.open(folder)


def test_a_tower_without_its_graph_is_refused(bundle: Path, tmp_path: Path) -> None:
    folder = bundles.copy(bundle, tmp_path / "b")
    manifest = bundles.manifest(folder)
    manifest["dialects"]["ort"]["text_tower"] = None
    bundles.forge(folder, manifest)
    with pytest.raises(BundleError, match="a text tower and its graph go together"):
        Bundle.open(folder)


def test_a_tokenizer_that_gives_unknown_ids_ends_the_question(bundle: Path, tmp_path: Path) -> None:
    folder = bundles.copy(bundle, tmp_path / "b")
    manifest = bundles.manifest(folder)
    manifest["text_tower"]["vocab"] = 300
    bundles.forge(folder, manifest)
    with (
        load(folder, threads=THREADS) as model,
        model.open(random_image(1)) as image,
        pytest.raises(BundleError, match="the text tower has 300 tokens"),
    ):
        image.ask("red?", reduce=SPEC)
