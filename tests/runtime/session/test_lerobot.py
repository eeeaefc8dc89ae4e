"""LeRobot's policies: actions of its own code, recorded with the files that it saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.bundles import ORT, export_with
from tests.support.exported import THREADS
from tests.support.families.lerobot import POLICIES, WORDS, make_policy, recorded
from tests.support.json_files import read_json, write_json
from tests.support.near import assert_near
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.chunks import SCHEDULES, Continuation
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.robot_units import restored
from vtx.runtime.errors import CheckpointError, RequestError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden

TOLERANCE = 1e-4
WIDEST = 3.0  # deviation of an action in its own units
KS = (2, 4)


def pictures() -> dict[str, Image.Image]:
    return {"top": random_image(0, (80, 60)), "wrist": random_image(1, (40, 90))}


def noise() -> Any:
    return np.random.default_rng(5).standard_normal((7, 5), np.float32)


def export_policy(folder: Path, policy: str, ks: tuple[int, ...] = KS) -> Path:
    checkpoint = make_policy(folder / "checkpoint", policy)
    return export_with(ExportOptions(str(checkpoint), ks, "fp32", dialects=(*ORT, "plain")), folder / "bundle").folder


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_actions_withdrawal_and_chunks_are_those_of_lerobot(policy: str, tmp_path: Path, tiny_pi: None) -> None:
    bundle = export_policy(tmp_path, policy)
    wanted = recorded()[policy]
    with load(bundle, device="cpu", threads=THREADS) as model:
        assert model.manifest.action is not None
        assert model.manifest.action.cameras == ("top", "wrist")
        for name, actions in wanted["actions"].items():
            k = int(name) if name.isdecimal() else None
            images = {"wrist": pictures()["wrist"]} if name == "wrist" else pictures()
            found = model.act(images, WORDS, wanted["state"], k=k, noise=noise())
            assert_near(found, actions, TOLERANCE * WIDEST)
        left = restored(model.manifest.action, "actions", np.array(wanted["previous"], np.float32))
        for schedule in SCHEDULES:
            after = Continuation(left, 2, 5, schedule)
            found = model.act(pictures(), WORDS, wanted["state"], k=None, noise=noise(), after=after)
            chunk = wanted["chunks"][schedule.upper()]
            assert_near(found, chunk, TOLERANCE * WIDEST)
        assert all(check.passed for check in check_golden(model)), list(check_golden(model))


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_policy(tmp_path_factory.mktemp("smolvla"), "smolvla")


@pytest.fixture(scope="module")
def model(smolvla: Path) -> Iterator[Model]:
    with load(smolvla, device="cpu", threads=THREADS) as loaded:
        yield loaded


@pytest.mark.slow
def test_openvino_gives_the_same_actions(model: Model, smolvla: Path) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    with load(smolvla, device="openvino", threads=1) as other:
        for k in (None, 2):
            found = [m.act(pictures(), WORDS, np.zeros(4), k=k, noise=noise()) for m in (model, other)]
            assert_near(found[0], found[1], TOLERANCE)


@pytest.mark.slow
def test_openvino_gives_the_same_actions_of_adaptive_norms(tmp_path: Path, tiny_pi: None) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    wanted = recorded()["pi05"]
    with load(export_policy(tmp_path, "pi05"), device="openvino", threads=1) as model:
        found = model.act(pictures(), WORDS, wanted["state"], k=2, noise=noise())
    assert_near(found, wanted["actions"]["2"], TOLERANCE * WIDEST)


def test_another_state_runs_through_the_decoder_alone(smolvla: Path) -> None:
    """It is the prompt's last token, which nothing before it sees."""
    with load(smolvla, device="cpu", threads=THREADS) as model:
        wanted = model.act(pictures(), WORDS, np.ones(4), k=2, noise=noise())
        model.act(pictures(), WORDS, np.zeros(4), k=2, noise=noise())
        found = model.act(pictures(), WORDS, np.ones(4), k=2, noise=noise())
        assert model.actor.encoded == 0
    np.testing.assert_array_equal(found, wanted)


def test_a_line_break_that_ends_the_instruction_is_the_only_one(model: Model) -> None:
    found = [model.act(pictures(), words, np.zeros(4), noise=noise()) for words in (WORDS, f"{WORDS}\n")]
    np.testing.assert_array_equal(*found)
    assert np.abs(model.act(pictures(), f"{WORDS}\n\n", np.zeros(4), noise=noise()) - found[0]).max() > TOLERANCE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": {}}, "the pictures lack top, wrist"),
        ({"images": {"left": random_image(0)}}, "the pictures lack top, wrist"),
        ({"images": {"top": random_image(0), "left": random_image(0)}}, "hold left"),
        ({"images": [random_image(0)]}, "1 pictures are given, and this bundle has 2 cameras"),
        ({"instruction": "red " * 60}, "the instruction takes .* tokens, and the model was trained with 48 at most"),
        ({"state": [0.0] * 6}, r"state has the shape \[6\], this model's is \[4\]"),
        ({"after": Continuation(np.zeros((2, 5)), 1)}, r"actions has the shape \[2, 5\], this model's is \[2, 3\]"),
        ({"after": Continuation(np.zeros((8, 3)), 1)}, "8 actions are left, and a chunk has 7"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(model: Model, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.act(**{"images": pictures(), "instruction": WORDS, "state": np.zeros(4), **changed})


def test_a_released_fit_is_refused(smolvla: Path) -> None:
    with pytest.raises(RequestError, match="fit 'released' is for"):
        load(smolvla, device="cpu", threads=THREADS, fit="released")


def altered(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    path = folder / name
    content = read_json(path)
    change(content)
    write_json(path, content)


def step_of(content: Any, name: str) -> Any:
    return next(step for step in content["steps"] if step["registry_name"] == name)


BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"


def test_cameras_have_the_names_that_the_robot_gives_them(tmp_path: Path) -> None:
    folder = make_policy(tmp_path, "smolvla")
    names = {"observation.images.front": "observation.images.top"}
    altered(folder, BEFORE, lambda c: step_of(c, "rename_observations_processor")["config"].update(rename_map=names))
    altered(folder, "config.json", lambda c: c["input_features"].update({
        "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 60, 80]}}))  # fmt: skip
    action = plan_export(ExportOptions(str(folder))).config.action
    assert action is not None
    assert action.cameras == ("front", "wrist")
    with pytest.raises(RequestError, match=r"this one names front, wrist; leave it out"):
        plan_export(ExportOptions(str(folder), cameras=("a", "b")))


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("IDENTITY", {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
        ("QUANTILES", {"low": (-2.0, 0.0, 1.0), "high": (2.0, 3.0, 1.0)}),
    ],
)  # fmt: skip
def test_each_mode_of_normalisation_has_its_statistics(tmp_path: Path, mode: str, fields: dict[str, Any]) -> None:
    folder = make_policy(tmp_path, "smolvla")
    altered(folder, AFTER, lambda c: step_of(c, "unnormalizer_processor")["config"]["norm_map"].update(ACTION=mode))
    action = plan_export(ExportOptions(str(folder))).config.action
    assert {name: getattr(action, f"actions_{name}") for name in fields} == fields


def test_a_policy_without_statistics_acts_in_normalised_units(tmp_path: Path) -> None:
    folder = make_policy(tmp_path, "smolvla")
    for file, name in ((BEFORE, "normalizer_processor"), (AFTER, "unnormalizer_processor")):
        altered(folder, file, lambda c, name=name: step_of(c, name).pop("state_file"))
    action = plan_export(ExportOptions(str(folder))).config.action
    assert action is not None
    assert action.state_mean is action.actions_mean is None


TABLES = {
    "pi05": ("paligemma_with_expert.paligemma", "language_model"), "smolvla": ("vlm_with_expert.vlm", "text_model"),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("policy", TABLES)
def test_a_table_that_is_an_output_matrix_is_read_as_lerobot_reads_it(
    tmp_path: Path, policy: str, tiny_pi: None
) -> None:
    """Published files hold the table under that name; with both, the embeddings count."""
    from safetensors.numpy import load_file, save_file

    folder = make_policy(tmp_path / "both", policy)
    both = plan_export(ExportOptions(str(folder))).checkpoint.tensors["text.embed_tokens.weight"].name
    tensors = load_file(folder / "model.safetensors")
    model, decoder = TABLES[policy]
    assert both == f"model.{model}.model.{decoder}.embed_tokens.weight"
    del tensors[both]
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, folder / "model.safetensors")
    alone = plan_export(ExportOptions(str(folder))).checkpoint.tensors["text.embed_tokens.weight"].name
    assert alone == f"{model}.lm_head.weight"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("file", "change", "error", "message"),
    [
        ("config.json", {"adapt_to_pi_aloha": True}, UnsupportedModelError, "adapt_to_pi_aloha True is not supported"),
        ("config.json", {"add_image_special_tokens": True}, UnsupportedModelError, "add_image_special_tokens True"),
        ("config.json", {"num_expert_layers": 2}, UnsupportedModelError, "num_expert_layers 2 is not supported"),
        ("config.json", {"attention_mode": "both"}, UnsupportedModelError, "attention_mode 'both' is not supported"),
        ("config.json", {"expert_width_multiplier": 0.01}, UnsupportedModelError, "an expert of width 0"),
        ("config.json", {"self_attn_every_n_layers": -1}, CheckpointError, "self_attn_every_n_layers is -1"),
        ("config.json", {"input_features": {}}, CheckpointError, "input_features has no camera"),
        ("config.json", {"output_features": {"action": {"type": "ACTION", "shape": [2]}}}, CheckpointError,
         r"action.mean has the shape \(3,\), not \[2\]"),
        ("config.json", {"output_features": {"action": {"type": "ACTION", "shape": []}}}, CheckpointError, "shape of"),
        ("config.json", {"chunk_size": 0}, CheckpointError, "chunk_size is 0"),
        ("config.json", {"vlm_model_name": "nobody/nothing"}, CheckpointError, "names 'nobody/nothing'.*--tower PATH"),
        (BEFORE, {"steps": 3}, CheckpointError, "steps is '3', not"),
        (BEFORE, {"steps": [{"registry_name": "xvla_image_scale"}]}, UnsupportedModelError, "'xvla_image_scale'"),
        (BEFORE, {"steps": [{"registry_name": "relative_actions_processor", "config": {"enabled": True}}]},
         UnsupportedModelError, "relative_actions_processor"),
        (BEFORE, {"steps": [{"registry_name": "normalizer_processor", "config": {"norm_map": {"VISUAL": "MEAN_STD"}}}]},
         UnsupportedModelError, "pictures are normalised by 'MEAN_STD'"),
        (AFTER, {"steps": [{"registry_name": "unnormalizer_processor", "state_file": "../x",
                            "config": {"norm_map": {"ACTION": "MEAN_STD"}}}]}, CheckpointError, "'../x', are not in"),
        (AFTER, {"steps": [{"registry_name": "unnormalizer_processor", "state_file": "x",
                            "config": {"norm_map": {"ACTION": "MODE"}}}]}, UnsupportedModelError, "by 'MODE'"),
    ],
)  # fmt: skip
def test_a_policy_that_vtx_would_run_otherwise_is_refused(
    tmp_path: Path,
    file: str,
    change: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = make_policy(tmp_path, "smolvla")
    altered(folder, file, lambda content: content.update(change))
    with pytest.raises(error, match=message) as caught:
        plan_export(ExportOptions(str(folder)))
    assert "\n" not in str(caught.value)


def test_an_old_policy_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = make_policy(tmp_path, "smolvla")
    (folder / BEFORE).unlink()
    with pytest.raises(CheckpointError, match=r"has no policy_preprocessor.json, .*migrate_policy_normalization"):
        plan_export(ExportOptions(str(folder)))
