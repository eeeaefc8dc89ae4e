"""MiniCPM-V 4.6: images and their slices, a tower whose patches merge between its blocks, and Qwen3.5's decoder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner

from tests.support.bundles import ORT, export, export_with
from tests.support.exported import THREADS, answer, policy, prompt
from tests.support.families.minicpm import MINICPM
from tests.support.fixtures import References
from tests.support.gates import write_gates
from tests.support.graphs import session
from tests.support.json_files import write_json
from tests.support.near import assert_near
from tests.support.parity import QUESTIONS
from tests.support.reference import Reference
from tests.support.tiny import edited, prompt_messages, random_image
from vtx import cli
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.calibration.source import open_source
from vtx.exporter.checkpoint.spec import find_size
from vtx.exporter.graphs.builder import Builder
from vtx.exporter.graphs.naflex import places
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.errors import (
    BundleError,
    CheckpointError,
    RequestError,
    TemplateError,
    UnsupportedModelError,
)
from vtx.runtime.session.session import Session
from vtx.runtime.vision.layouts import read_layout
from vtx.runtime.vision.layouts.slices import Slices
from vtx.tools.calibration.report import FORMAT, read_choice

TOLERANCE = 1e-4  # as of Qwen3.5
KS = (2, 3, 5, 8)
FINE = replace(MINICPM, downsample="4x", numbered=False)
WIDE, HIGH, SMALL = (150, 61), (70, 190), (40, 40)  # two with 3 slices, one without
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Export, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint(MINICPM), tmp_path_factory.mktemp("minicpm") / "bundle", KS, "fp32").folder


@pytest.fixture(scope="module")
def judge(reference: References) -> Reference:
    return reference(MINICPM)


def test_the_export_chooses_the_patches_of_a_token_whatever_the_checkpoint_says(
    tiny_checkpoint: Export, reference: References, tmp_path: Path
) -> None:
    """Two checkpoints of the same weights, whose files name the other number, and the number that is chosen."""
    numbered = replace(FINE, numbered=True)
    image, messages = random_image(0, WIDE), prompt_messages(QUESTIONS[1])
    for tiny, chosen, like in ((MINICPM, "4x", numbered), (numbered, "16x", MINICPM)):
        options = ExportOptions(str(tiny_checkpoint(tiny)), (), "fp32", dialects=ORT, downsample=chosen)
        folder = export_with(options, tmp_path / chosen).folder
        judge = reference(like)
        with load(folder, device="cpu", threads=THREADS) as model:
            asked, inputs = prompt(model, messages, [image]), judge.inputs(messages, [image])
            assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
            found = answer(Session(model.backend, model.manifest), asked, policy(None), 3)
            assert_near(found, judge.greedy(inputs, None, 3).logits, TOLERANCE)
            assert model.manifest.record["options"]["downsample"] == chosen
    with pytest.raises(RequestError, match=r"--downsample is '8x'; this model has 16x, 4x; use one of these"):
        plan_export(ExportOptions(str(tiny_checkpoint(MINICPM)), downsample="8x"))
    with pytest.raises(RequestError, match="this model leaves no choice; leave it out"):
        plan_export(ExportOptions(downsample="4x"))


def test_a_calibration_or_gates_of_another_number_of_patches_are_refused_by_it(
    tiny_checkpoint: Export, tmp_path: Path
) -> None:
    checkpoint = str(tiny_checkpoint(MINICPM))
    fine, coarse = (open_source(checkpoint, reading=ExportOptions(downsample=chosen)) for chosen in ("4x", "16x"))
    assert open_source(checkpoint).fingerprint == coarse.fingerprint != fine.fingerprint
    bundle = export_with(ExportOptions(checkpoint, (), "fp32", dialects=ORT, downsample="4x"), tmp_path / "b").folder
    assert open_source("", bundle).fingerprint == fine.fingerprint
    report = tmp_path / "report.json"
    write_json(report, {"format": FORMAT, "model": asdict(fine.calibrated)})
    with pytest.raises(RequestError, match="measured with --downsample '4x', this is 16x"):
        read_choice(report, coarse.fingerprint)
    pair = np.zeros((8, 2 * fine.config.text.hidden), np.float32), np.zeros((2, 8), np.float32)
    gates = write_gates(tmp_path / "gates.safetensors", {3: pair}, {"model_fingerprint": fine.fingerprint})
    options = ExportOptions(checkpoint, (3,), "fp32", dialects=ORT, gates=gates)
    with pytest.raises(CheckpointError, match="trained with --downsample '4x', this is 16x"):
        plan_export(options)
    assert plan_export(replace(options, downsample="4x")).gated_ks == (3,)


def test_eleven_images_have_their_numbers_and_users_cannot_write_marks(model: Model, judge: Reference) -> None:
    images = [random_image(number, (20, 20)) for number in range(11)]
    messages = prompt_messages("red?", 11)
    asked = prompt(model, messages, images)
    assert asked.ids.tolist() == judge.inputs(messages, images)["input_ids"][0].tolist()
    text = model.loaded.text
    marked = text.prompt(prompt_messages("<slice> <image_id>7</image_id>", 0), [])
    assert not {*marked.tolist()} & {text.tokenizer.token_to_id(mark) for mark in ("<slice>", "<image_id>")}


@pytest.mark.parametrize("shape", [WIDE, HIGH, SMALL, (300, 300), (1, 1)], ids=str)
def test_pixels_are_those_of_transformers_processor_on_pillow(
    model: Model, judge: Reference, shape: tuple[int, int]
) -> None:
    image = random_image(2, shape)
    inputs = judge.inputs(prompt_messages("red?"), [image])
    patch, at, pixels = MINICPM.patch, 0, inputs["pixel_values"][0].numpy()
    views = model.loaded.images.prepare(image).views
    assert [[view.shape[1] // patch, view.shape[2] // patch] for view in views] == inputs["target_sizes"].tolist()
    for view in views:
        rows, columns = view.shape[1] // patch, view.shape[2] // patch
        own = pixels[:, :, at : at + rows * columns * patch]
        at += rows * columns * patch
        wanted = own.reshape(3, patch, rows, columns, patch).transpose(0, 2, 1, 3, 4).reshape(view.shape)
        assert_near(view, wanted, 1e-6)
    assert at == pixels.shape[-1]


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["16x", "4x"])
@pytest.mark.parametrize("most", [1, 2, 5, 9, 64])
def test_sizes_slices_and_tokens_are_those_of_transformers_functions(mode: str, most: int) -> None:
    from transformers import MiniCPMV4_6ImageProcessorPil

    theirs, merge = MiniCPMV4_6ImageProcessorPil(), 2 if mode == "4x" else 4
    layout = Slices(14, merge, 448, most, True)
    rng = np.random.default_rng(most)
    sizes = [(640, 480), (448, 448), (449, 448), (1920, 1080), (3000, 15), (15, 3000), (9000, 45), (3, 3), (1, 199)]
    sizes += [(int(width), int(width * 2 ** rng.uniform(-4, 4)) or 1) for width in rng.integers(1, 4000, 400)]
    for width, height in sizes:
        grid = theirs.get_sliced_grid((height, width), most, 448)
        views = [theirs.find_best_resize((height, width), 448, 14, mode, allow_upscale=grid is None)]
        if grid is not None:
            high, wide = theirs.get_refine_size((height, width), grid, 448, 14, mode, allow_upscale=True)
            views += [(high // grid[0], wide // grid[1])] * (grid[0] * grid[1])
        tokens = [high * wide // (14 * merge) ** 2 for high, wide in views]
        form = layout.prompt_image(width, height)
        assert form.spans == tuple(tokens)
        assert layout.count(width, height) == sum(tokens) <= layout.max_tokens
        assert layout.passes(width, height) == len(tokens) <= layout.max_views
        assert form.text("?").count("\n") == (0 if grid is None else grid[0] - 1)


def test_a_square_image_of_the_published_size_has_49_tokens_and_196() -> None:
    for merge, tokens in ((4, 49), (2, 196)):
        layout = Slices(16, merge, 448, 9, True)
        assert layout.count(448, 448) == tokens
        assert layout.count(1344, 1344) == 10 * tokens
        assert layout.prompt_image(448, 448).text("?", 3) == "<image_id>3</image_id><image>?</image>"
    wide = replace(layout, numbered=False).prompt_image(1344, 896).text("?")
    assert wide == "<image>?</image>" + "\n".join(["<slice>?</slice>" * 3] * 2)


def test_fewer_slices_are_as_transformers_has_them_with_fewer(model: Model) -> None:
    layout = read_layout(model.manifest.layout, model.manifest.model.tower)
    assert layout.passes(150, 150) == 5
    assert layout.limited(3).passes(150, 150) == 3
    assert layout.limited(1).passes(150, 150) == layout.limited(2).passes(150, 150) == 1
    with pytest.raises(RequestError, match="use max_tiles"):
        layout.within(4096)


@pytest.mark.sampled
@pytest.mark.parametrize("side", [1, 2, 3, 5, 27, 32, 70, 72])
def test_places_in_the_table_of_positions_are_those_of_transformers(tmp_path: Path, side: int) -> None:
    """Also at exact fractions, which its float32 edges of 27 and 72 entries miss by a last digit."""
    ov = pytest.importorskip("openvino")
    from transformers.vision_utils import get_vision_nearest_position_ids

    def build(b: Builder) -> None:
        counts = b.input("count", ir.DataType.INT64, [1])
        b.output(places(b, side, counts), "places", ir.DataType.INT64, ["places"])

    onnxruntime = session(tmp_path, build)
    compiled = ov.Core().compile_model(tmp_path / "graph.onnx", "CPU")
    for count in (*range(1, 100), side, 2 * side, 3 * side):
        wanted = get_vision_nearest_position_ids(torch.tensor([[1, count]]), side).tolist()
        given = {"count": np.array([count])}
        assert onnxruntime.run(None, given)[0].tolist() == wanted
        assert compiled(given)[0].tolist() == wanted


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        (None, {"downsample_mode": "8x"}, "downsample_mode '8x' is not supported in a MiniCPM-V 4.6 model"),
        (None, {"merger_times": 2}, "merger_times 2 is not supported"),
        (None, {"merge_kernel_size": [4, 4]}, r"merge_kernel_size \[4, 4\] is not supported"),
        (None, {"insert_layer_id": -1}, "insert_layer_id is -1, not the number of a block of the tower, 0 to 3"),
        (None, {"insert_layer_id": 4}, "insert_layer_id is 4, not the number of a block"),
        (None, {"insert_layer_id": "6"}, "insert_layer_id"),
        (None, {"image_token_id": None}, "image_token_index None is not a token id"),
        (None, {"image_token_id": 99_999}, "is not a token id below the vocabulary's 330"),
        ("vision_config", {"window_kernel_size": [3, 3]}, r"window_kernel_size \[3, 3\] is not supported"),
        ("vision_config", {"num_channels": 4}, "a tower of 4 channels is not supported"),
        ("text_config", {"model_type": "qwen3"}, "the text model 'qwen3'"),
        ("text_config", {"linear_num_value_heads": 3}, "is not a multiple of linear_num_key_heads 2"),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit_are_refused_by_name(
    tiny_checkpoint: Export, tmp_path: Path, part: str | None, change: dict[str, Any], reason: str
) -> None:
    broken = edited(tiny_checkpoint(MINICPM), tmp_path / "broken", "config.json", change, part)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        plan_export(ExportOptions(str(broken), (), "fp32"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_slice_nums": 0}, "max_slice_nums is 0, not a number from 1"),
        ({"max_slice_nums": 10_000}, "it needs 1 to 64 slices"),
        ({"max_slice_nums": 1 << 20}, "max_slice_nums is 1048576, not a number from 1 to 16384"),
        ({"scale_resolution": 16}, "slices of 16 x 16 pixels in tokens of 32 x 32"),
        ({"scale_resolution": 16_000}, "at most 33,554,432 pixels in all"),
        ({"downsample_mode": "4x"}, "downsample_mode is '4x', the tower's is 16x; correct it"),
        ({"downsample_mode": "2x"}, "downsample_mode is '2x'"),
        ({"patch_size": 16}, "patch_size is 16, the tower's is 8"),
        ({"patch_size": None}, "patch_size is 14, the tower's is 8"),
        ({"slice_mode": 1}, "the image processor's slice_mode is 1; it must be true or false"),
        ({"use_image_id": "no"}, "use_image_id is 'no'; it must be true or false"),
        ({"do_resize": False}, "without do_resize"),
    ],
    ids=str,
)
def test_image_processors_that_do_not_fit_are_refused_by_name(
    tiny_checkpoint: Export, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    broken = edited(tiny_checkpoint(MINICPM), tmp_path / "broken", "preprocessor_config.json", change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        plan_export(ExportOptions(str(broken), (), "fp32"))


def test_without_slice_mode_images_have_one_view(tiny_checkpoint: Export, tmp_path: Path) -> None:
    whole = edited(tiny_checkpoint(MINICPM), tmp_path / "whole", "preprocessor_config.json", {"slice_mode": False})
    layout = plan_export(ExportOptions(str(whole), (), "fp32")).config.layout
    assert isinstance(layout, Slices)
    assert (layout.most, layout.max_views, layout.passes(1000, 700)) == (1, 1, 1)


def test_an_image_of_one_token_is_answered_as_by_transformers(tiny_checkpoint: Export, tmp_path: Path) -> None:
    changes = {"scale_resolution": 32, "slice_mode": False}
    small = edited(tiny_checkpoint(MINICPM), tmp_path / "small", "preprocessor_config.json", changes)
    judge, images, messages = Reference(small), [random_image(0, SMALL)], prompt_messages(QUESTIONS[1])
    inputs = judge.inputs(messages, images)
    with load(export(small, tmp_path / "bundle", (3,), dialects=ORT).folder, device="cpu", threads=THREADS) as model:
        asked = prompt(model, messages, images)
        assert int(asked.is_vision.sum()) == 1
        assert asked.ids.tolist() == inputs["input_ids"][0].tolist()
        for k in (None, 3):
            found = answer(Session(model.backend, model.manifest), asked, policy(k), 3)
            assert_near(found, judge.greedy(inputs, k, 3).logits, TOLERANCE)


@pytest.mark.parametrize("times", [0, 2])
def test_a_template_that_prints_an_image_not_once_is_refused(
    tiny_checkpoint: Export, tmp_path: Path, times: int
) -> None:
    place = tmp_path / "twice"
    shutil.copytree(tiny_checkpoint(MINICPM), place)
    template = (place / "chat_template.jinja").read_text(encoding="utf-8")
    (place / "chat_template.jinja").write_text(
        template.replace(MINICPM.image_token, MINICPM.image_token * times), encoding="utf-8"
    )
    with pytest.raises(TemplateError, match=rf"prints <\|image_pad\|> {times} times for 1 images"):
        plan_export(ExportOptions(str(place), (), "fp32")).source().text.prompt(prompt_messages("red?"), 4)


def test_the_command_exports_four_patches_a_token(tiny_checkpoint: Export, tmp_path: Path) -> None:
    made = tmp_path / "bundle"
    asked = ["--model", str(tiny_checkpoint(MINICPM)), "--downsample", "4x", "--arithmetic", "f32", "--dialect", "ort"]
    done = CliRunner().invoke(cli.export, [*asked, "--out", str(made)])
    assert done.exit_code == 0, done.output
    assert Bundle.open(made).manifest.layout.parameters["merge"] == 2
    done = CliRunner().invoke(cli.export, [*asked[:2], "--downsample", "none", "--out", str(tmp_path / "other")])
    assert done.exit_code == 1
    assert "this model has 16x, 4x; use one of these" in done.output


def test_a_tokenizer_without_the_marks_is_refused(tiny_checkpoint: Export, tmp_path: Path) -> None:
    place = tmp_path / "unmarked"
    shutil.copytree(tiny_checkpoint(MINICPM), place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        marked = (place / name).read_text(encoding="utf-8")
        (place / name).write_text(marked.replace("<slice>", "<piece>"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="the tokenizer has no token <slice>, which stand"):
        plan_export(ExportOptions(str(place), (), "fp32"))


def test_a_bundle_whose_slices_are_not_the_tower_s_is_refused(folder: Path, model: Model) -> None:
    spec, tower = model.manifest.layout, model.manifest.model.tower
    for change in ({"merge": 2}, {"patch": 16}, {"most": 0}, {"most": 65}):
        broken = replace(spec, parameters={**spec.parameters, **change})
        with pytest.raises(BundleError):
            read_layout(broken, tower)


def test_the_merger_s_work_is_counted(tiny_checkpoint: Export) -> None:
    """Of 4 layers two see all patches and two a quarter; without it all see all."""
    coarse, fine = (find_size(str(tiny_checkpoint(tiny))).seeing(4).vision for tiny in (MINICPM, FINE))
    assert coarse is not None
    assert fine is not None
    assert (coarse.patches, fine.patches) == (64, 16)
    h, ffn, patches = coarse.model.vision.hidden, coarse.model.vision.ffn, 64
    layers = sum(2 * (n * (4 * h * h + 2 * h * ffn) + 2 * n * n * h) for n in (patches, patches // 4))
    merger = patches * (4 * h * h + 2 * 4 * h) + patches // 4 * (16 * h * ffn + 4 * h * ffn)
    assert coarse.layer_macs == (layers + merger) // 4
