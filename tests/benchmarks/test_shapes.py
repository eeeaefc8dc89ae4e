"""The benchmark of the newest families at their sizes: every step on the same families, a hundredth as wide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import shapes
from benchmarks.page_shapes import PAGE_SHAPES
from benchmarks.shape_files import SHAPES, Shape, tensors, write_checkpoint, write_json

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.families.registry import read_config

TEXT = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 48}
SMALLER: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen3-vl-2b": (
        HEADS | {"num_hidden_layers": 4, "head_dim": 128},
        {"depth": 3, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1, 2]},
    ),
    "gemma4-e2b": (
        {"num_hidden_layers": 10, "num_kv_shared_layers": 5, "num_attention_heads": 4, "head_dim": 16,
         "global_head_dim": 32, "hidden_size_per_layer_input": 8},
        {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "lfm2-vl-1.6b": (
        HEADS | {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 16},
        {"num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    "qwen3.5-2b": (
        HEADS | {"num_hidden_layers": 4, "head_dim": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                 "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        {"depth": 2, "num_heads": 2, "out_hidden_size": 64},
    ),
    "lightonocr-1b": (HEADS | {"num_hidden_layers": 4, "head_dim": 16},
                      {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 280}),
    "glm-ocr": (HEADS | {"num_hidden_layers": 4}, {"depth": 2, "num_heads": 2, "out_hidden_size": 64}),
    "qwen3.5-35b-a3b": (
        HEADS | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                 "linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32,
                 "shared_expert_intermediate_size": 32, "num_experts": 16},
        {"depth": 2, "num_heads": 2, "out_hidden_size": 64},
    ),
    "ministral3-3b": (HEADS | {"num_hidden_layers": 4, "head_dim": 16},
                      {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "image_size": 280}),
}  # fmt: skip


def smaller(name: str) -> Shape:
    shape = {**SHAPES, **PAGE_SHAPES}[name]
    text, tower = SMALLER[name]
    config = {**shape.config, "text_config": {**shape.config["text_config"], **TEXT, **text}}
    if "layer_types" in config["text_config"]:
        kinds = config["text_config"]["layer_types"]
        config["text_config"]["layer_types"] = kinds[: config["text_config"]["num_hidden_layers"]]
    config["vision_config"] = {**shape.config["vision_config"], **TOWER, **tower}
    return replace(shape, config=config, k=3, picture=280 if shape.torch else 192 if name == "gemma4-e2b" else 256)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALLER])
def test_transformers_reads_every_tensor_and_repeats_the_last_token(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    shape = smaller(name)
    write_checkpoint(tmp_path, shape, shard_bytes=1 << 20)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, about = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not any(about.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == shape.vocab
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in shape.specials} == shape.specials
    ids = tokenizer("What is this?", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, -1]
    best = logits.topk(2)
    assert int(best.indices[0]) == int(ids[0, -1])
    assert float(best.values[0] - best.values[1]) > 0.5
    assert bool(logits.isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2-vl-1.6b", "lightonocr-1b"])  # the smallest vocabulary, and a reader of pages
def test_steps_run_once_each_and_end_in_tables(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {name: smaller(name)}

    def step(*words: str) -> list[dict[str, Any]]:
        shapes.main([*words, "--work", str(tmp_path), "--rounds", "1", "--new-tokens", "3", "--threads", "1"], chosen)
        return [json.loads(line) for line in (tmp_path / shapes.RESULTS).read_text().splitlines()]

    torch_too = chosen[name].torch
    step("make")
    if torch_too:
        step("rivals")
    step("export")
    assert shapes.checkpoint(tmp_path, name).exists() == torch_too
    exported = step("export")
    assert [line["step"] for line in exported] == ["make", *["rival"] * torch_too, "export"]
    assert exported[-1]["k"] == 3
    assert 0 < exported[-1]["bundle"] < exported[-1]["peak_rss"]
    step("measure")
    lines = step("measure")
    runs = [line for line in lines if line["step"] == "run"]
    assert [line.get("failed") for line in runs] == [None] * (5 if torch_too else 4)
    engines = {engine: {line["contender"] for line in runs if engine in line["contender"]} for engine in shapes.ENGINES}
    assert [len(found) for found in engines.values()] == [2, 2]
    for line in runs:
        result = line["result"]
        assert min(result["first"], result["second"], result["decode"], result["rss"]) > 0
        assert len(result["ids"]) == 3
    capsys.readouterr()
    step("report")
    said = capsys.readouterr().out
    assert said.count(chosen[name].title) == 5 + torch_too
    assert ("torch in " in said) == torch_too


def test_the_tables_of_other_shapes_stay_when_some_are_written(tmp_path: Path) -> None:
    name = "lightonocr-1b"
    records = shapes.Records(tmp_path)
    records.add("make", name, parameters=10**9)
    records.add("export", name, k=10, bundle=10**9, peak_rss=10**9, memory="1 GB", predicted="1 GB")
    other = {"table": "shapes-export", "row": ["another"]}
    old = [{"table": "pages-export", "row": [title]} for title in ("LightOnOCR 1B", "GLM-OCR 0.9B", "nobody knows")]
    lines = shapes.result_lines([other, *old], records, {**SHAPES, **PAGE_SHAPES})
    assert [line["table"] for line in lines] == ["shapes-export", *["pages-export"] * 3]
    assert lines[0] == other
    assert lines[2] == old[1]
    assert lines[3]["row"][:2] == ["LightOnOCR 1B", "1.00 billion"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*PAGE_SHAPES])
def test_the_published_sizes_of_a_page_shape_are_read_and_have_a_head_where_transformers_does(
    name: str, tmp_path: Path
) -> None:
    shape = PAGE_SHAPES[name]
    write_json(tmp_path / "config.json", shape.config)
    decoder = read_config(shape.config).text
    assert 2 <= shape.k <= decoder.layers
    assert decoder.tied != ("lm_head.weight" in dict(tensors(tmp_path)))


def test_an_unknown_shape_is_refused_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shapes.main(["make", "qwen9", "--work", str(tmp_path)])
    assert "qwen9: not among qwen3-vl-2b" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALLER][::3])
def test_the_predicted_disk_is_that_of_the_bundle_whatever_the_largest_image(name: str, tmp_path: Path) -> None:
    shape = smaller(name)
    write_checkpoint(tmp_path / "checkpoint", shape)
    options = ExportOptions(str(tmp_path / "checkpoint"), (3,), "int4", allow_changed_answers=shape.torch)
    plan = plan_export(replace(options, dialects=("ort",)))
    run_export(plan, tmp_path / "bundle", force=False, report=lambda *_: None)
    disk = sum(file.stat().st_size for file in (tmp_path / "bundle").rglob("*") if file.is_file())
    assert plan.prediction.disk == pytest.approx(disk, rel=0.05)
