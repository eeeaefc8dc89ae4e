"""Checkpoints in their authors' layouts with Llama's published tokenizer.model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.families import lisa
from tests.support.families.eagle import TinyEagle, make_eagle
from tests.support.families.original import PAD, write_json
from tests.support.families.vila import VILA
from tests.support.published.places import published
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export

MODEL = published() / "tokenizers" / "llama" / "tokenizer.model"
PIECES, VOCAB = 32000, 32003
# "USER:", "ASSISTANT:" and a line break behind an image, as LLaVA's authors print them
IDS = {"USER:": [3148, 1001, 29901], "ASSISTANT:": [319, 1799, 9047, 13566, 29901], "\nWhat": [29871, 13, 5618]}


def with_llamas_tokenizer(folder: Path) -> Path:
    """The checkpoint with Llama's tokenizer, and tables of its size."""
    from safetensors.torch import load_file, save_file

    for path in folder.rglob("*.safetensors"):
        weights = load_file(path)
        for name in [name for name in weights if name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
            weights[name] = weights[name].repeat(VOCAB // len(weights[name]) + 1, 1)[:VOCAB].contiguous()
        save_file(weights, path, metadata={"format": "pt"})
    old = next(folder.rglob("tokenizer.model"))
    shutil.copyfile(MODEL, old)
    for path in (folder / "config.json", old.with_name("config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, config | ({"vocab_size": VOCAB} if "vocab_size" in config else {}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason=f"no {MODEL}; name the folder of published files with PUBLISHED")
@pytest.mark.parametrize("family", ["llava_llama", "vila", "lisa", "eagle"])
def test_authors_layouts_are_planned_with_llamas_tokenizer(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    if family == "eagle":
        make_eagle(folder, TinyEagle())
    else:
        tiny = {"llava_llama": replace(PAD, pickled=False, shards=1), "vila": VILA, "lisa": lisa.LISA}[family]
        shutil.copytree(tiny_checkpoint(tiny), folder)
    with_llamas_tokenizer(folder)
    added = {token: PIECES + n for n, token in enumerate(lisa.ADDED)} if family == "lisa" else {}
    if added:
        write_json(folder / "added_tokens.json", added)
    plan = plan_export(ExportOptions(str(folder), allow_pickle=True))
    tokenizer = Tokenizer.from_str(plan.tokenizer)
    assert {token: tokenizer.token_to_id(token) for token in added} == added
    assert plan.text.seg_token_id == added.get("[SEG]")
    assert {text: tokenizer.encode(text, add_special_tokens=False).ids for text in IDS} == IDS
    assert (plan.text.image_token_id, plan.text.ids_before, plan.text.end_ids) == (0, (1,), (2,))
