"""Checkpoints in their authors' layouts with Llama's published tokenizer.model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.bundles import ORT, export_anew
from tests.support.exported import greedy, prompt
from tests.support.families import lisa
from tests.support.families.eagle import Judge as EagleJudge
from tests.support.families.eagle import TinyEagle, make_eagle
from tests.support.families.lisa_judge import Judge as LisaJudge
from tests.support.families.original import PAD, counterpart
from tests.support.families.vila import VILA
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.parity import STEPS
from tests.support.published.compare import OK, TOLERANCE, Row
from tests.support.published.places import published
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load

pytest.importorskip("sentencepiece", reason="the [export] extra is not installed in full")

MODEL = published() / "tokenizers" / "llama" / "tokenizer.model"
PIECES, VOCAB = 32000, 32003
UNUSED = 31999  # a piece that no prompt here has: the place of an image for transformers
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
        config = read_json(path)
        write_json(path, config | ({"vocab_size": VOCAB} if "vocab_size" in config else {}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason=f"no {MODEL}; name the folder of published files with PUBLISHED")
@pytest.mark.parametrize("family", ["llava_llama", "vila", "lisa", "eagle"])
def test_authors_layouts_are_planned_with_llamas_tokenizer(
    family: str, tiny_checkpoint: Checkpoints, tmp_path: Path
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


def lisa_judge(theirs: Path, ours: Path) -> LisaJudge:
    """The judge of a checkpoint whose tables have got Llama's size; its added tokens are behind Llama's pieces."""
    from safetensors.torch import load_file

    judge = LisaJudge(theirs, ours, lisa.LISA)
    (tables,) = (load_file(path) for path in ours.glob("*.safetensors"))
    judge.model.get_input_embeddings().weight.data = tables["model.embed_tokens.weight"].float()
    judge.model.get_output_embeddings().weight.data = tables["lm_head.weight"].float()
    judge.image_token = judge.model.config.image_token_id = UNUSED
    judge.added = {token: PIECES + n for n, token in enumerate(lisa.ADDED)}
    write_json(ours / "added_tokens.json", judge.added)
    return judge


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason=f"no {MODEL}; name the folder of published files with PUBLISHED")
@pytest.mark.parametrize("family", ["lisa", "eagle"])
def test_models_of_which_no_files_are_published_here_answer_as_their_judges(
    family: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    row, image = Row(family, "made, with Llama's tokenizer"), random_image(1, (150, 60))
    folder = tmp_path / "checkpoint"
    if family == "eagle":
        sizes = TinyEagle(vocab=VOCAB)
        make_eagle(folder, sizes)
        shutil.copyfile(MODEL, folder / "tokenizer.model")
        eagle = EagleJudge(folder, sizes)
        wanted, (ids, logits) = eagle.ids(lisa.QUESTION, 1), eagle.greedy([image], lisa.QUESTION, None, STEPS)
    else:
        shutil.copytree(tiny_checkpoint(lisa.LISA), folder)
        judge = lisa_judge(tiny_checkpoint(counterpart(lisa.LISA)), with_llamas_tokenizer(folder))
        inputs = judge.lisa_inputs([image], lisa.LISA.vision_tokens)
        wanted = [0 if id == UNUSED else id for id in inputs["input_ids"][0].tolist()]
        answer = judge.greedy(inputs, None, STEPS)
        ids, logits = answer.ids, answer.logits
    bundle = export_anew(ExportOptions(str(folder), (), "fp32", dialects=ORT), tmp_path / "bundle")
    with load(bundle.folder, device="cpu", threads=1) as model:
        asked = prompt(model, prompt_messages(lisa.QUESTION), [image])
        found = greedy(model, asked, None, STEPS, forced=ids).logits
    most = float(np.abs(found - logits.numpy()).max())
    row.ids = OK if asked.ids.tolist() == wanted else f"{len(asked.ids)} ids, theirs {len(wanted)}"
    row.logits = OK if most <= TOLERANCE * float(logits.abs().max()) else f"up to {most:.2g}"
    row.record()
    assert not row.faults
