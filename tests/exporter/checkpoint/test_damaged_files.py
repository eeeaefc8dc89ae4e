"""Files of a checkpoint that are cut, huge, or of other types: one line that names the file, and no bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import ORT, export_anew
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny
from vtx.exporter.bundling.options import ExportOptions
from vtx.runtime.errors import VtxError

pytestmark = pytest.mark.usefixtures("in_process")

FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    "quantize_config.json", "adapter_config.json",
)  # fmt: skip
HUGE = 64 << 20
DAMAGES = {  # the text of a file from its sound one, and the words of the refusal
    "cut": (lambda text: text[: len(text) // 2], "not sound JSON"),
    "empty": (lambda _: "", "not sound JSON"),
    "a list": (lambda _: "[1]", "a JSON list, not an object"),
    "null": (lambda _: "null", "a JSON NoneType, not an object"),
    "a key twice": (lambda _: '{"a": 1, "a": 2}', "'a' is duplicated"),
    "deep": (lambda _: '{"a":' * 200 + "1" + "}" * 200, "deeper than the limit of 64"),
    "huge": (lambda _: json.dumps({"padding": " " * HUGE}), "67,108,879 bytes, the limit for such a file is"),
}
VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"text_config": 7}, "config.json"),
    ("config.json", {"text_config": [1]}, "config.json"),
    ("config.json", {"vision_config": 7}, "config.json"),
    ("config.json", {"image_token_index": -1}, "image_token_index -1 is not a token id below"),
    ("config.json", {"image_token_index": 1 << 40}, "image_token_index 1099511627776 is not a token id below"),
    ("config.json", {"image_token_index": "5"}, "'image_token_index' expected int, got str"),
    ("config.json", {"quantization_config": 7}, r"is quantised \(quantization_config\); vtx reads awq"),
    ("config.json", {"text_config": {"quantization_config": [1]}}, r"is quantised \(quantization_config\); vtx reads"),
    ("tokenizer_config.json", {"bos_token": 7}, "bos_token has to be either str or AddedToken"),
    ("tokenizer_config.json", {"eos_token": {"content": ["a"]}}, "eos_token has to be either str or AddedToken"),
    ("tokenizer_config.json", {"tokenizer_class": 7}, "cannot load the tokenizer"),
    ("tokenizer_config.json", {"extra_special_tokens": {"image_token": 7}}, "image_token has to be either str or"),
    ("special_tokens_map.json", {"additional_special_tokens": 7}, "cannot load the tokenizer"),
    ("generation_config.json", {"eos_token_id": [[2]]}, r"eos_token_id must be .* not \[\[2\]\]"),
    ("generation_config.json", {"eos_token_id": -1}, "eos_token_id must be .* not -1"),
    ("generation_config.json", {"eos_token_id": 1 << 40}, "eos_token_id must be .* not 1099511627776"),
    (
        "generation_config.json",
        {"eos_token_id": 9_999_999},
        r"the id 9999999 \(None\), and the model has 320",
    ),
    ("quantize_config.json", {"bits": "x"}, "bits is 'x'; vtx reads 4, 8"),
    ("quantize_config.json", {"bits": 4}, "says gptq, but no tensor is quantised so"),
]


def assert_refused(checkpoint: Path, folder: Path, message: str) -> None:
    with pytest.raises(VtxError, match=message) as error:
        export_anew(ExportOptions(str(checkpoint), dialects=ORT), folder / "out" / "bundle")
    assert "\n" not in str(error.value)
    assert not (folder / "out").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_leaves_nothing(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, damage: str
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint(Tiny(layers=2)), tmp_path / "checkpoint"))
    change, message = DAMAGES[damage]
    path = checkpoint / name
    path.write_text(change(path.read_text(encoding="utf-8") if path.exists() else '{"a": 1}'), encoding="utf-8")
    assert_refused(checkpoint, tmp_path, f"{name} .*{message}")


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "change", "message"), VALUES)
def test_a_value_of_another_type_is_named_and_leaves_nothing(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint(Tiny(layers=2)), tmp_path / "checkpoint"))
    path = checkpoint / name
    settings = read_json(path) if path.exists() else {}
    write_json(path, settings | change)
    assert_refused(checkpoint, tmp_path, message)
