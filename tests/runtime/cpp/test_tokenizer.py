"""Token ids and decoded text of libvtx are those of the `tokenizers` library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.cpp import needs_cpp, output
from tests.support.fixtures import Checkpoints
from tests.support.json_files import read_json, write_json
from tests.support.tiny import Tiny

pytestmark = needs_cpp

WORDS = (
    "The",
    "quick",
    "brown",
    "fox",
    "it's",
    "I'LL",
    "we've",
    "don't",
    "\u017f",
    "'\u017f",
    "1234567",
    "3.14",
    "²½",
    "Ⅷ",
    "é",
    "e\u0301",
    "ﬁancé",
    "Größe",
    "ΣΑΣ",
    "İstanbul",
    "日本語",
    "テキスト",
    "ﾊﾝｶｸ",
    "한국어",
    "\u1112\u1161\u11ab",
    "العربية",
    "हिन्दी",
    "ไทย",
    "🙂",
    "👩‍👩‍👧‍👦",
    "\u200b",
    "\u00a0",
    "\u3000",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    "  ",
    "   ",
    " ",
    "▁",
    "▁▁",
    "Ġ",
    "<s>",
    "</s>",
    "<unk>",
    "<image>",
    "<0x41>",
    "!",
    "...",
    "—",
    "(a)",
    "\x00",
    "\x7f",
    "\u0300",
    "\ufeff",
    "\U0001d400",
    "Å",
    "\u212b",
    "ǆ",
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)

    def one() -> str:
        return "".join(rng.choice(WORDS) + rng.choice(("", " ", "")) for _ in range(rng.randint(1, 12)))

    return [one() for _ in range(count)]


def differences(path: Path, samples: list[str]) -> list[tuple[str, Any, Any]]:
    tokenizer = Tokenizer.from_file(str(path))
    lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in samples)
    found = [json.loads(line) for line in output("probe", "tokenize", path, stdin=lines.encode()).decode().splitlines()]
    assert len(found) == len(samples)
    wrong = []
    for text, got in zip(samples, found, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        want = {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}
        if want != got:
            wrong.append((text, want, got))
    return wrong


def demo() -> Path:
    return Path(__file__).parents[3] / "exporter/demo_model/tokenizer.json"


def qwen(path: Path, expression: str) -> Path:
    """The demo's tokenizer with the normal form of Qwen's, and an expression of one."""
    spec = read_json(demo())
    spec["normalizer"] = {"type": "NFC"}
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, levels]}
    write_json(path, spec)
    return path


def llama(source: Path, path: Path) -> Path:
    """A tokenizer of Llama's older form: a space that a normalizer prepends, and no pre-tokenizer."""
    spec = read_json(source)
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    spec["normalizer"] = {"type": "Sequence", "normalizers": steps}
    spec["pre_tokenizer"] = None
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    write_json(path, spec)
    return path


def gemma(source: Path, path: Path, *, marked: bool) -> Path:
    """A tokenizer of Gemma's form: words end behind spaces; `marked`: a normalizer leaves none, so none ends."""
    spec = read_json(source)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spec["normalizer"] = replaced if marked else None
    spec["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    spec["decoder"] = {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]}
    write_json(path, spec)
    return path


KINDS = "demo", "qwen2", "qwen3_5", "metaspace", "bytes", "llama", "gemma", "spaces"


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_the_library(kind: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    if kind == "demo":
        path = demo()
    elif kind.startswith("qwen"):
        path = qwen(tmp_path / "tokenizer.json", QWEN2 if kind == "qwen2" else QWEN35)
    else:
        path = tiny_checkpoint(Tiny(tokenizer="bytes" if kind == "bytes" else "metaspace")) / "tokenizer.json"
        path = llama(path, tmp_path / "tokenizer.json") if kind == "llama" else path
        if kind in ("gemma", "spaces"):
            path = gemma(path, tmp_path / "tokenizer.json", marked=kind == "gemma")
    assert differences(path, texts(3000, len(kind))) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "a model other than BPE"),
        ({"pre_tokenizer": {"type": "Digits", "individual_digits": True}}, "the step Digits"),
        ({"normalizer": {"type": "Nmt"}}, "the step Nmt"),
        ({"decoder": {"type": "CTC"}}, "the step CTC"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    from tests.support.cpp import run

    path = tmp_path / "tokenizer.json"
    write_json(path, {**read_json(demo()), **change})
    done = run("probe", "parse", "tokenizer", path)
    assert done.returncode == 1
    assert message in done.stderr.decode()
