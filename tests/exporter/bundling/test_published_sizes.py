"""Predictions compared with published numbers of weights, and with the disk and memory that 7B exports took."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny
from vtx.exporter.bundling import predict
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import Plan, plan_export
from vtx.exporter.calibration import calibrate
from vtx.exporter.calibration.calibrate import CalibrationOptions
from vtx.exporter.calibration.source import OpenedModel
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.graphs.vision import vision_tensors
from vtx.exporter.reference.prompts import PreparedItem
from vtx.tools.data.items import Item
from vtx.tools.estimate.flops import kv_bytes
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import precisions_by_name

PUBLISHED = {  # parameters that the model cards on the hub state
    "llava-1.5-7b": 7_063_427_072,
    "llava-1.5-13b": 13_350_839_296,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "smolvlm2-500m": 507_482_304,
    "lfm2-vl-450m": 450_822_656,
    "lfm2-vl-1.6b": 1_584_804_000,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_take_two_bytes_each_of_the_published_number(name: str) -> None:
    costs = make_plan(
        KNOWN[name], Workload(64, 576, 256), PlannedMethods([None]), precisions_by_name(KNOWN[name], ["fp16", "fp32"])
    )
    assert costs.weights_bytes["fp16"] == pytest.approx(2 * PUBLISHED[name], rel=0.005)  # without unused layers
    assert costs.weights_bytes["fp32"] == pytest.approx(4 * PUBLISHED[name], rel=0.005)


def test_a_context_of_4096_tokens_takes_two_gibibytes_of_a_7b_llama() -> None:
    decoder = KNOWN["llava-1.5-7b"].decoder
    assert sum(kv_bytes(decoder, [4096] * 32, 2)) == 2 << 30
    assert sum(kv_bytes(KNOWN["qwen2.5-vl-3b"].decoder, [1] * 36, 2)) == 36 * 2 * 2 * 128 * 2


@pytest.fixture(scope="module")
def seven(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the shape of LLaVA-1.5-7B whose weights are a hole in a file: they take no disk."""
    folder = tmp_path_factory.mktemp("seven") / "llava-7b"
    shutil.copytree(tiny_checkpoint(Tiny()), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    settings = read_json(folder / "config.json")
    settings["text_config"] |= {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 4096, "vocab_size": 32064,
    }  # fmt: skip
    settings["vision_config"] |= {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14,
    }  # fmt: skip
    write_json(folder / "config.json", settings)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            written = (folder / name).read_text()
            side = read_json(tiny_checkpoint(Tiny()) / "config.json")["vision_config"]["image_size"]
            (folder / name).write_text(written.replace(f": {side}", ": 336"))
    config = read_config(settings)
    header, end = {}, 0
    for name, shape in (*vision_tensors(config), *config.text.tensors()):
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def plan_7b(folder: Path, precision: str) -> Plan:
    return plan_export(ExportOptions(str(folder), (17, 9), precision))


# Measured while a random 7B model was exported and asked about an image (docs/explanation/precision.md).
@pytest.mark.parametrize(("precision", "disk", "export_memory"), [("fp16", 14.1e9, 863e6), ("int4", 4.16e9, 890e6)])
def test_predictions_of_a_7b_export_match_its_measurements(
    seven: Path, monkeypatch: pytest.MonkeyPatch, precision: str, disk: float, export_memory: float
) -> None:
    monkeypatch.setattr(predict, "export_base", lambda: predict.EXPORT_BASE)  # of PyTorch's build for CPUs
    predicted = plan_7b(seven, precision).prediction
    assert predicted.disk == pytest.approx(disk, rel=0.02)
    assert predicted.export_memory == pytest.approx(export_memory, rel=0.05)
    assert predicted.kv_full == 524_288  # bytes of a slot
    if precision == "int4":
        assert predicted.run_memory == pytest.approx(5.79e9, rel=0.1)


# Bytes beyond Python, PyTorch and the tokenizer at the peak of an int4 export on 32 questions of 64 tokens, of three
# random layers (benchmarks/make_checkpoint.py, shapes 0.5b and 1b).
@pytest.mark.parametrize(
    ("shape", "taken"),
    [((896, 4864, 14, 2), 723e6 - 416e6), ((2048, 5504, 16, 16), 732e6 - 376e6)],
    ids=["0.5b", "1b"],
)
def test_the_memory_of_an_activation_aware_export_matches_its_measurement(
    seven: Path, shape: tuple[int, int, int, int], taken: float
) -> None:
    settings = json.loads((seven / "config.json").read_text())
    hidden, ffn, heads, kv_heads = shape
    settings["text_config"] |= {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }
    predicted = predict.measuring_memory(read_config(settings).text, [64] * 32, "int4")
    assert predicted == pytest.approx(taken, rel=0.2)


SEEING = """
import json, sys
from dataclasses import replace

import numpy as np
import torch
from benchmarks.shape_files import SHAPES

from vtx.exporter.bundling.predict import seeing_memory
from vtx.exporter.checkpoint.families.registry import find_family, read_config
from vtx.exporter.graphs.vision import vision_tensors
from vtx.exporter.reference.model import Reference
from vtx.runtime.backends.allocation import returning_memory

shape, size = SHAPES[sys.argv[1]], [int(side) for side in sys.argv[2:]]
layers = "depth" if "depth" in shape.config["vision_config"] else "num_hidden_layers"
config = {**shape.config, "vision_config": {**shape.config["vision_config"], layers: 2}}
if config["vision_config"].get("deepstack_visual_indexes"):
    config["vision_config"]["deepstack_visual_indexes"] = [0]
config = find_family(config).adjust(read_config(config), shape.files["preprocessor_config.json"])
shapes = dict(vision_tensors(config))


class Drawn:
    def read(self, name, rows=None):
        return torch.full(shapes[name], 0.01)


def used():  # ru_maxrss would begin with the memory of the process that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

reference, pixels = Reference(None, config, Drawn()), np.zeros((1, 3, *size), np.float32)
import transformers.activations
before = used()
with torch.inference_mode(), returning_memory():
    tokens = len(reference.features(pixels))
print(json.dumps([tokens * config.vision.square**2, used() - before, seeing_memory(config)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
@pytest.mark.parametrize(("name", "size"), [("gemma4-e2b", (672, 912)), ("qwen3-vl-2b", (224, 320))])
def test_a_tower_of_published_width_sees_the_golden_picture_in_the_predicted_memory(
    name: str, size: tuple[int, int]
) -> None:
    """Two blocks of it, whose hidden states are those of all; the matrix of scores would take 610 MB of Gemma 4's."""
    command = [sys.executable, "-c", SEEING, name, *map(str, size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    patches, taken, predicted = json.loads(done.stdout)
    assert patches == size[0] * size[1] // 16**2
    assert taken <= 1.1 * predicted
    assert predicted <= 2.5 * taken


def test_the_predicted_memory_of_a_7b_calibration_matches_its_measurement(
    seven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two questions, 28 candidates, no answers: 2.52 GB measured (docs/how-to/choose-k.md)."""
    monkeypatch.setattr(calibrate, "export_base", lambda: predict.EXPORT_BASE)
    plan, text, options = plan_7b(seven, "fp16"), 64, CalibrationOptions(max_new_tokens=0, batch=2)
    ids = np.array([1] * text + [plan.config.image_token_id] * 576)
    items = [PreparedItem(Item((), "?"), ids, None)] * 2
    source = plan.source()
    model = OpenedModel(**{each.name: getattr(source, each.name) for each in fields(source)}, origin=plan)
    memory = calibrate.predict_memory(model, items, options)
    assert memory == pytest.approx(2.52e9, rel=0.25)
    assert memory < calibrate.predict_memory(model, items, replace(options, max_new_tokens=1)) - 26e9
