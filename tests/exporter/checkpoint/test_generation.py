"""Ends of a turn, and generation_config.json's sampling, which is left to each request."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.text import CHATML, MISTRAL, VICUNA, make_settings, make_tokenizer, read, write_checkpoint
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.generation import FILE, generation_warnings, turn_ends


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, {"<|im_end|>", "</s>"}),  # the end of a turn, and the tokenizer's end token
        (MISTRAL, {"</s>"}),
        (VICUNA, {"</s>"}),  # prints nothing after an answer
        ("{{ raise_exception('no answers') if messages | length > 1 else '' }}" + VICUNA, {"</s>"}),
        (VICUNA.replace("c['text'] + ' '", "'<s>'"), {"</s>"}),  # the beginning of the next turn
    ],
)
def test_the_template_and_the_tokenizer_say_what_ends_a_turn(template: str, ends: set[str]) -> None:
    tokenizer = make_tokenizer("first")
    found = turn_ends(tokenizer, template, make_settings(tokenizer))
    assert found == {token: tokenizer.token_to_id(token) for token in ends}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("generation", "ends"), [(None, ["</s>", "<|im_end|>"]), ({}, ["</s>", "<|im_end|>"]), ([2], ["</s>"])]
)
def test_the_end_of_a_turn_ends_an_answer_if_no_file_says_otherwise(
    generation: Any, ends: list[str], tmp_path: Path
) -> None:
    top = write_checkpoint(tmp_path, template=CHATML) | {"eos_token_id": 2}
    if generation is not None:
        write_json(tmp_path / FILE, {"eos_token_id": generation} if generation else {})
    _, template, settings = read(tmp_path, top)
    tokenizer = make_tokenizer("first")
    assert [tokenizer.id_to_token(id) for id in settings.end_ids] == ends
    warnings = generation_warnings({}, tokenizer, template, settings)
    missing = tokenizer.token_to_id("<|im_end|>")
    text = f"<|im_end|> ({missing}) ends a turn or a text, and is not among eos_token_id of {FILE}, [2]: answers go on"
    assert [warning.startswith(text) for warning in warnings] == [True] * (2 - len(ends))


GREEDY: list[dict[str, Any]] = [
    {}, {"do_sample": False, "temperature": 0.7}, {"do_sample": True, "top_k": 1, "temperature": 0.01},
    {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.0},
]  # fmt: skip


@pytest.mark.parametrize(
    ("generation", "asked"),
    [
        *((generation, None) for generation in GREEDY),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
            "do_sample True, temperature 0.7, top_p 0.8, top_k 20",
        ),
        ({"do_sample": True}, "do_sample True"),
        (
            {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05},
            "repetition_penalty 1.05",
        ),
        ({"do_sample": True, "temperature": "hot\nline"}, r"do_sample True, temperature 'hot\nline'"),
    ],
)
def test_sampling_that_a_request_would_have_to_ask_for_is_named(generation: dict[str, Any], asked: str | None) -> None:
    tokenizer = make_tokenizer("first")
    warnings = generation_warnings(generation, tokenizer, VICUNA, make_settings(tokenizer))
    if asked is None:
        assert warnings == []
        return
    (warning,) = warnings
    assert "\n" not in warning
    assert "vtx answers greedily" in warning
    assert f"{FILE} asks for {asked}" in warning


def test_a_plan_warns_of_both(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(Tiny()), tmp_path / "checkpoint"))
    path = folder / FILE
    old = read_json(path) if path.exists() else {}
    write_json(path, {**old, "eos_token_id": [5], "do_sample": True, "temperature": 0.6, "top_p": 0.9})
    warnings = plan_export(ExportOptions(str(folder))).warnings
    assert [warning for warning in warnings if "is not among eos_token_id" in warning]
    assert [
        warning
        for warning in warnings
        if "asks for do_sample True, temperature 0.6, top_p 0.9; vtx answers greedily" in warning
    ]
