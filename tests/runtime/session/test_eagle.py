"""Eagle-X5: five towers side by side, against a statement on transformers' modules and in plain PyTorch.

`VTX_CONFIGURATIONS=20` sets how many random configurations are compared.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.bundles import ORT, export
from tests.support.dialects import DialectBackend
from tests.support.exported import THREADS, greedy, prompt
from tests.support.families.eagle import (
    NAMES,
    TINY,
    TOWERS,
    Judge,
    config_of,
    drawn,
    make_eagle,
    rewrite,
    rewritten_config,
)
from tests.support.near import assert_near
from tests.support.parity import assert_later_equal_fresh
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families import eagle
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.spec import config_of as config_of_manifest
from vtx.exporter.checkpoint.spec import config_size
from vtx.exporter.graphs.joined import resizing
from vtx.exporter.graphs.vision import vision_tensors
from vtx.exporter.reference.feed_forward import activate
from vtx.exporter.reference.joined import JoinedTowers
from vtx.exporter.weights.tensors import CheckpointWeights
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.bundle.spec.names import DIALECTS
from vtx.runtime.errors import CheckpointError, UnsupportedModelError
from vtx.runtime.report.golden import check_golden
from vtx.tools.estimate.flops import encode_flops
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import all_weights, precisions_of
from vtx.tools.model.tensors import products
from vtx.tools.model.towers.joined.parts import PARTS

sentencepiece = pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

STEPS, KS, TOLERANCE = 6, (3, 5, 8), 1e-4  # the last of the largest number
QUESTION, QUESTIONS = "What is  the picture?", ("red?", "What is the picture?", "the red picture")
WIDE, HIGH = (150, 60), (40, 90)
PICTURES = [random_image(0, WIDE), random_image(1, HIGH)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle(tmp_path_factory.mktemp("eagle") / "checkpoint", TINY)


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = export(checkpoint, tmp_path_factory.mktemp("eagle") / "bundle", KS, dialects=DIALECTS)
    return made.folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with load(folder, device="cpu", threads=THREADS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> Judge:
    return Judge(checkpoint, TINY)


def near(found: Any, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    largest = float(wanted.abs().max())
    assert_near(np.asarray(found), wanted.numpy(), tolerance * largest)


def compare(model: Model, judge: Judge, ks: tuple[int, ...], images: list[Any], question: str = QUESTION) -> set[Any]:
    """Pixels, features, ids and logits; returns the answers, by K."""
    views = [np.asarray(model.loaded.images.prepare(image).views) for image in images]
    near(np.concatenate(views), judge.pixels(images), 1e-6)
    hidden = np.stack([model.backend.vision(view).hidden.reshape(judge.tiny.tokens, -1) for view in views])
    near(hidden, judge.features(judge.pixels(images)))
    asked, answers = prompt(model, prompt_messages(question, len(images)), images), set[Any]()
    assert asked.ids.tolist() == judge.ids(question, len(images))
    for k in (None, *ks):
        ids, logits = judge.greedy(images, question, k, STEPS)
        first, second = logits.topk(2).values.T
        found = greedy(model, asked, k, STEPS, forced=ids)
        near(found.logits, logits)
        if float((first - second).min()) > 2 * TOLERANCE * float(logits.abs().max()):
            assert found.logits.argmax(-1).tolist() == ids
        answers.add(tuple(ids))
    return answers


@pytest.mark.sampled
@pytest.mark.parametrize("tower", TOWERS)
def test_each_tower_alone_is_that_of_the_statement(checkpoint: Path, judge: Judge, tower: str) -> None:
    opened, pixels = open_checkpoint(str(checkpoint)), judge.pixels(PICTURES)
    vision = read_config(opened.config).vision
    (own,) = (part for part in vision.towers if part.family == tower)
    towers = JoinedTowers(replace(vision, towers=(own,), hidden=own.width), CheckpointWeights(opened).read, activate)
    near(towers.states(pixels), judge.tower(tower, pixels), 1e-5)


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_graph_of_each_tower_alone_is_that_of_the_statement(
    checkpoint: Path, folder: Path, judge: Judge, tmp_path: Path, dialect: str, tower: str
) -> None:
    import onnx_ir as ir
    import onnxruntime

    from vtx.exporter.graphs.builder import FLOAT, Builder
    from vtx.exporter.graphs.dialects import make_dialect
    from vtx.exporter.graphs.joined import build_joined

    plan, pixels = plan_export(ExportOptions(str(checkpoint), KS, "fp32", dialects=DIALECTS)), judge.pixels(PICTURES)
    (own,) = (part for part in plan.config.vision.towers if part.family == tower)
    alone = replace(plan.config.vision, towers=(own,), hidden=own.width)
    # next to the weights, which the graph reads
    b = Builder("tower", plan.weights.stored, folder, make_dialect(dialect, "fp32", 64, ir.DataType.FLOAT))
    given = b.input("pixels", FLOAT, ["images", 3, TINY.image, TINY.image])
    b.output(build_joined(b, alone, given), "out", FLOAT, ["images", TINY.tokens, own.width])
    path = folder / f"alone-{tower}.{dialect}.onnx"
    b.write(path)
    try:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"pixels": pixels.numpy()})
        near(found, judge.tower(tower, pixels))
    finally:
        path.unlink()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("images", [PICTURES[:1], PICTURES[1:], PICTURES], ids=["wide", "high", "two"])
def test_pixels_features_ids_and_logits_are_those_of_the_statement(
    model: Model, judge: Judge, images: list[Any]
) -> None:
    answers = compare(model, judge, KS, images)
    assert len(answers) > 1, "K changes nothing, so the test shows nothing"


@pytest.mark.parametrize("k", [None, 3, 8])
def test_later_questions_equal_fresh_ones(model: Model, k: int | None) -> None:
    assert_later_equal_fresh(model, PICTURES, k, QUESTIONS, tolerance=1e-4)


def test_golden_vectors_hold_and_the_configuration_comes_back(model: Model, checkpoint: Path) -> None:
    checks = list(check_golden(model))
    assert checks
    assert all(check.passed for check in checks), checks
    plan = plan_export(ExportOptions(str(checkpoint), KS, "fp32", dialects=ORT))
    assert config_of_manifest(model.manifest) == plan.config


def test_openvino_gives_the_same_features_and_answers(model: Model, judge: Judge, folder: Path) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    with load(folder, device="openvino", threads=1) as other:
        compare(other, judge, KS[:1], PICTURES)
        for k in (None, *KS):
            options = Options(STEPS, ignore_eos=True)
            answers = [m.open(PICTURES).ask(QUESTION, k, options) for m in (model, other)]
            assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["ort-cuda", "plain", "trt", "trt10"])
def test_graphs_of_other_dialects_compute_the_same(model: Model, dialect: str) -> None:
    other = Model(model.bundle, DialectBackend(model.bundle, dialect), 0)
    for k in (None, 5):
        asked = [prompt(m, prompt_messages(QUESTION, 2), PICTURES) for m in (model, other)]
        wanted, found = (greedy(m, p, k, STEPS) for m, p in zip((model, other), asked, strict=True))
        assert found.ids == wanted.ids
        assert_near(found.logits, wanted.logits, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.01), ("bf16", 0.05), ("int8", 0.1), ("int4", 0.6)])
def test_logits_are_near_at_other_precisions(
    checkpoint: Path, judge: Judge, tmp_path: Path, precision: str, most: float
) -> None:
    bundle = export(checkpoint, tmp_path / "bundle", (3,), precision, dialects=ORT)
    with load(bundle.folder, device="cpu", threads=THREADS) as rounded:
        assert all(check.passed for check in check_golden(rounded))
        asked = prompt(rounded, prompt_messages(QUESTION), PICTURES[:1])
        ids, wanted = judge.greedy(PICTURES[:1], QUESTION, 3, STEPS)
        found = greedy(rounded, asked, 3, STEPS, forced=ids).logits
        error = np.sqrt(np.mean((found - wanted.numpy()) ** 2)) / float(wanted.std())
        assert error < most


def test_convolutions_and_tables_of_positions_stay_floats_in_an_integer_bundle(checkpoint: Path) -> None:
    plan = plan_export(ExportOptions(str(checkpoint), (3,), "int8", vision_precision="int8", dialects=ORT))
    stored = {name: tensor for name, tensor in plan.weights.stored.items() if name.startswith("vision.")}
    rounded = {name for name, tensor in stored.items() if tensor.scales is not None}
    assert {name.split(".")[1] for name in rounded} == {*TOWERS}
    assert not {name for name in rounded if len(stored[name].shape) != 2}
    assert not {name for name in rounded if "embed" in name or "position" in name}
    matrices = {name for name, tensor in stored.items() if len(tensor.shape) == 2 and tensor.shape[1] % 16 == 0}
    assert {name for name in matrices - rounded if "embed" not in name} == set()


@pytest.mark.parametrize("spec", ["cls", "mustdrop:layers=3/5", "visionzip", "hiprune", "lsm"])
def test_methods_that_look_into_one_tower_are_refused_by_name(checkpoint: Path, spec: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{spec.partition(':')[0]} reads the patches of a single tower"):
        plan_export(ExportOptions(str(checkpoint), (3,), "fp32", reductions=(spec,), dialects=ORT))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["fastv:k=2,ratio=0.5", "divprune:keep=8", "cdpruner:keep=8"])
def test_methods_that_work_on_tokens_are_exported(checkpoint: Path, tmp_path: Path, spec: str) -> None:
    bundle = export(checkpoint, tmp_path / "bundle", (3,), reductions=(spec,), dialects=ORT)
    with load(bundle.folder, device="cpu", threads=THREADS) as reduced:
        answer = reduced.open(PICTURES[:1]).ask(QUESTION, None, Options(STEPS, ignore_eos=True), reduce=spec)
        assert len(answer.token_ids) == STEPS


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("count", "out", "how"),
    [
        (1024, 336, {"corners": True}), (24, 32, {"corners": True}), (45, 32, {"corners": True}),
        (5, 1, {"corners": True}), (1, 4, {"corners": True}),
        (1024, 720, {"antialias": True}), (128, 180, {"antialias": True}),
        (14, 64, {"cubic": True}), (16, 5, {"cubic": True}), (24, 32, {"cubic": True, "antialias": True}),
        (24, 6, {"cubic": True, "antialias": True}),
    ],
)  # fmt: skip
def test_matrices_resize_as_pytorch_does(count: int, out: int, how: dict[str, bool]) -> None:
    picture = torch.rand(1, 2, count, count, generator=torch.Generator().manual_seed(0))
    kind = "bicubic" if how.get("cubic") else "bilinear"
    wanted = F.interpolate(
        picture, (out, out), mode=kind, align_corners=how.get("corners", False), antialias=how.get("antialias", False)
    )
    matrix = torch.from_numpy(resizing(count, out, **how))
    torch.testing.assert_close(matrix @ picture @ matrix.T, wanted, atol=2e-6, rtol=0)


# ---- what a checkpoint may lack --------------------------------------------------------------------------------------

OF = "model.vision_tower.vision_towers.{}.vision_tower."


def broken(checkpoint: Path, place: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    shutil.copytree(checkpoint, place)
    rewrite(place, change)
    return str(place)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tower", "tensor", "named"),
    [
        (0, "vision_model.embeddings.patch_embedding.weight", "vision.clip.embeddings.patch_embedding.weight"),
        (0, "vision_model.encoder.layers.0.mlp.fc2.bias", "vision.clip.encoder.layers.0.mlp.fc2.bias"),
        (1, "stages.2.blocks.0.weight", "vision.convnext.stages.2.blocks.0.weight"),
        (1, "stages.3.blocks.0.conv_dw.weight", "vision.convnext.stages.3.blocks.0.conv_dw.weight"),
        (2, "layers.1.attn.rel_pos_w", "vision.sam.layers.1.attn.position_embedding_w"),
        (2, "layers.1.attn.rel_pos_h", "vision.sam.layers.1.attn.position_embedding_h"),
        (2, "neck.conv1.weight", "vision.sam.neck.conv1.weight"),
        (3, "blocks.0.attn.q_bias", "vision.eva02.blocks.0.attn.q_bias"),
        (3, "blocks.1.mlp.ffn_ln.weight", "vision.eva02.blocks.1.mlp.ffn_ln.weight"),
        (4, "embeddings.row_embedder.weight", "vision.pix2struct.embeddings.row_embedder.weight"),
        (4, "encoder.layer.0.mlp.wo.weight", "vision.pix2struct.encoder.layer.0.mlp.wo.weight"),
    ],
)  # fmt: skip
def test_a_missing_or_odd_tensor_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, tower: int, tensor: str, named: str
) -> None:
    name = OF.format(tower) + tensor

    def without(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    def longer(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.cat((tensors[name], tensors[name][:1]))[None].contiguous()

    for number, change in enumerate((without, longer)):
        place = broken(checkpoint, tmp_path / str(number), change)
        with pytest.raises(CheckpointError, match=rf"tensor {named} "):
            plan_export(ExportOptions(place, (3,), "fp32", dialects=ORT))


@pytest.mark.slow
def test_a_tower_of_the_published_width_without_its_last_layers_is_refused(tmp_path: Path) -> None:
    tiny = replace(TINY, clip=(1, 1024, 16))
    with pytest.raises(CheckpointError, match="the tower clip has 1 layers, and Eagle-X5's of that width has 24"):
        open_checkpoint(str(make_eagle(tmp_path / "x", tiny)))


def test_a_checkpoint_without_a_tower_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".vision_towers.3." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"tensor vision\.eva02\.\S+ is missing"):
        open_checkpoint(broken(checkpoint, tmp_path / "x", without))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mm_vision_tower": "clip-448;convnext-1024"}, "the vision towers 'clip-448;convnext-1024' are not supported"),
        ({"mm_vision_tower": ["clip-448"]}, "the vision towers .*; vtx supports clip-448;convnext-1024;sam-1024"),
        ({"image_aspect_ratio": "anyres"}, "image_aspect_ratio 'anyres' is not supported in an Eagle-X5"),
        ({"mm_hidden_size": 7680}, "mm_hidden_size is 7680, but the five towers give 256"),
        ({"mm_projector_type": "spatial"}, "mm_projector_type 'spatial' is not supported"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    place = Path(shutil.copytree(checkpoint, tmp_path / "x"))
    rewritten_config(place, **changed)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        plan_export(ExportOptions(str(place), (3,), "fp32", dialects=ORT))


@pytest.mark.slow
def test_a_setting_of_any_kind_is_read_or_refused() -> None:
    refused = 0
    for name in config_of(TINY):
        for wrong in (None, -1, 1.5, 1 << 80, "x", [], {}, [None] * 2, True):
            try:
                read_config({**config_of(TINY), "mm_hidden_size": 7680, name: wrong})
            except (CheckpointError, UnsupportedModelError):
                refused += 1
    assert refused > 50


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tower", "tensor", "shape", "message"),
    [
        (0, "vision_model.embeddings.position_embedding.weight", (146, 64), "is of 145 places, which are no square"),
        (0, "vision_model.embeddings.patch_embedding.weight", (64, 3, 400, 400), "have 400 pixels a side, and its"),
        (2, "pos_embed", (1, 7, 7, 32), "pictures of 112 pixels and 7 patches a side"),
        (2, "layers.0.attn.rel_pos_h", (7, 16), r"for windows of several sizes, \[3, 4\]"),
        (2, "layers.0.attn.rel_pos_h", (5, 15), "the tower sam has hidden size 32, no multiple of its heads' 15"),
        (3, "rope_win.freqs_cos", (8, 32), "rope_win.freqs_cos is of 8 places, which are no square"),
        (3, "rope_win.freqs_cos", (9, 2), "its heads 2 numbers"),
        (3, "patch_embed.proj.weight", (64, 3, 24, 24), "patches of vision.eva02 have 24 pixels a side"),
        (4, "embeddings.row_embedder.weight", (45, 64), "has 45 rows, 46 are needed"),
        (4, "embeddings.patch_projection.weight", (64, 47), "is of 15 places, which are no square"),
    ],
)
def test_a_tensor_of_a_shape_that_does_not_fit_is_refused(
    checkpoint: Path, tmp_path: Path, tower: int, tensor: str, shape: tuple[int, ...], message: str
) -> None:
    def other(tensors: dict[str, torch.Tensor]) -> None:
        tensors[OF.format(tower) + tensor] = torch.zeros(shape)

    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(broken(checkpoint, tmp_path / "x", other))


@pytest.mark.slow
def test_the_graph_at_the_published_sizes_gives_an_image_s_tokens(tmp_path: Path) -> None:
    """By shapes alone: there are no weights of that size here."""
    import onnx
    import onnx_ir as ir

    from vtx.exporter.graphs.builder import FLOAT, Builder
    from vtx.exporter.graphs.dialects import make_dialect
    from vtx.exporter.graphs.joined import constant_bytes
    from vtx.exporter.graphs.vision import build_vision
    from vtx.exporter.weights.plan import StoredTensor

    config = read_config({**config_of(TINY), "mm_hidden_size": 7680})
    assert config.layout.max_tokens == 1024
    stored = {
        name: StoredTensor("x.safetensors", 0, 4 * math.prod(shape), "F32", shape)
        for name, shape in vision_tensors(config)
    }
    b = Builder("vision", stored, tmp_path, make_dialect("plain", "fp32", 64, FLOAT))
    build_vision(b, config)
    written = ir.serde.serialize_model(b.model())
    inferred = onnx.shape_inference.infer_shapes(written, check_type=True, strict_mode=True, data_prop=True)
    found = inferred.graph.value_info
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in found}
    (node,) = (node for node in written.graph.node if node.op_type == "Concat" and len(node.input) == 5)
    assert [shapes[name][1:] for name in node.input] == [[32, 32, n] for n in (1024, 3072, 1024, 1024, 1536)]
    layers = 24 + 40 + 24 + 24 + 18
    assert constant_bytes(config.vision) < written.ByteSize() < constant_bytes(config.vision) + 12_000 * layers


def test_towers_in_a_config_json_are_not_read() -> None:
    found = read_config({**config_of(TINY), "towers": [{"family": "clip"}], "mm_hidden_size": 7680})
    assert found.vision.towers == eagle.PUBLISHED


def test_the_sizes_of_a_plan_are_those_of_the_weights(checkpoint: Path) -> None:
    published = {
        "model_type": "eagle_llama", "architectures": ["EagleLlamaForCausalLM"], "mm_vision_tower": NAMES,
        "mm_projector_type": "mlp2x_gelu", "mm_hidden_size": 7680, "image_aspect_ratio": "pad", "vocab_size": 32000,
    }  # fmt: skip
    known = KNOWN["eagle-x5-7b"]
    found = config_size(published, "x")
    assert (found.decoder, found.vision) == (known.decoder, known.vision)
    assert known.vision is not None
    assert known.vision.image_tokens == 1024
    opened = open_checkpoint(str(checkpoint))
    for config, size in (
        (read_config(published), known), (read_config(opened.config), config_size(opened.config, "x")),
    ):  # fmt: skip
        shapes = [shape for _, shape in (*vision_tensors(config), *config.text.tensors())]
        assert size.parameters == sum(map(math.prod, shapes))
        assert (
            sum(group.count * math.prod(group.shape) for group in all_weights(size, precisions_of(size, "fp32")))
            == size.parameters
        )
    macs, tera = 0, 2e-12
    for part in known.vision.model.vision.towers:
        macs += sum(places * products(tensors) for places, tensors in PARTS[part.family](part))
    assert tera * macs == pytest.approx(13.3, rel=0.05)  # DyVTE's tables, which leave out attention's products
    # attention: all layers of CLIP and Pix2Struct, whole ones and windows of SAM and EVA-02
    seen = 1024 * (24 * 576**2 + 4 * 4096**2 + 20 * 25 * 196**2 + 8 * 4096**2 + 16 * 4096 * 256) + 1536 * 18 * 2025**2
    projector = 1024 * (7680 * 4096 + 4096**2)
    assert encode_flops(known.vision, 1) == 2 * (macs + 2 * seen + projector)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("VTX_CONFIGURATIONS", "1"))))
def test_random_configurations_answer_as_the_statement(tmp_path: Path, number: int) -> None:
    tiny, ks = drawn(number)
    checkpoint = make_eagle(tmp_path / "checkpoint", tiny, number)
    bundle = export(checkpoint, tmp_path / "bundle", ks, dialects=("ort", "plain"))
    judge, images = Judge(checkpoint, tiny, number), [random_image(number, WIDE), random_image(number + 1, HIGH)]
    devices = ["cpu", *(["openvino"] if _has_openvino() else [])]
    for device in devices:
        with load(bundle.folder, device=device, threads=THREADS) as model:
            compare(model, judge, ks, images[: 1 + number % 2])
            assert_later_equal_fresh(model, images[:1], ks[0], QUESTIONS, tolerance=1e-4)


def _has_openvino() -> bool:
    from importlib.util import find_spec

    return find_spec("openvino") is not None


@pytest.mark.slow
def test_clip_sees_more_pixels_if_the_declared_side_is_another(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "CLIP_SIDE", 448)
    monkeypatch.setattr("tests.support.families.eagle.CLIP_SIDE", 448)
    judge, opened = Judge(checkpoint, TINY), open_checkpoint(str(checkpoint))
    vision, pixels = read_config(opened.config).vision, judge.pixels(PICTURES)
    assert (vision.towers[0].grid, vision.towers[0].position_grid) == (16, 12)
    towers = JoinedTowers(vision, CheckpointWeights(opened).read, activate)
    wanted = torch.cat([judge.tower(name, pixels) for name in TOWERS], -1)
    near(towers.states(pixels), wanted, 1e-5)
