"""Tokenizers and templates made to cost memory or time end as one line, and a bundle never gets to see them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_files import read_json, write_json
from tests.support.text import VICUNA, read, write_checkpoint
from vtx.runtime.errors import CheckpointError, TemplateError, VtxError
from vtx.runtime.host.confined import ChildLimits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits are Linux's")
Spec = dict[str, Any]
SLOW = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
BIG = "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


def replacing(pattern: str, content: str) -> Spec:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def normalizers(*parts: Spec) -> Callable[[Spec], None]:
    return lambda spec: spec.update(normalizer={"type": "Sequence", "normalizers": [*parts]})


def with_token(**change: Any) -> Callable[[Spec], None]:
    return lambda spec: spec["added_tokens"].append(
        {**spec["added_tokens"][0], "id": 900, "content": "<new>", **change}
    )


HOSTILE: dict[str, tuple[Callable[[Spec], None], str]] = {
    "a growing normalizer": (
        normalizers(*[replacing("a", "a" * 1000)] * 3),
        "makes up to 1,000,000,000 characters of one",
    ),
    "many small steps": (
        normalizers(*[replacing("e", "eeee")] * 20),
        "makes up to 1,099,511,627,776 characters of one",
    ),
    "a long prefix": (normalizers({"type": "Prepend", "prepend": "a" * 10_000_000}), "has 10,000,000 characters"),
    "a long special token": (with_token(content="x" * 30_000_000), "an added token has 30,000,000 characters"),
    "an id beyond 32 bits": (
        lambda spec: spec["model"]["vocab"].update(zzz=1 << 31),
        "is 2147483648, the limit is 16,777,215",
    ),
    "an added id beyond 32 bits": (with_token(id=1 << 31), "is 2147483648, the limit is 16,777,215"),
    "many parts": (normalizers(*[{"type": "NFC"}] * 300), "has 301 parts, the limit is 256"),
    "a wide decoder": (
        lambda spec: spec.update(decoder={"type": "Sequence", "decoders": [replacing("a", "a" * 600)] * 2}),
        "the decoder makes up to 360,000 characters of one",
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizers_are_refused_with_the_limit(name: str, tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path)
    spec = read_json(tmp_path / "tokenizer.json")
    change, message = HOSTILE[name]
    change(spec)
    write_json(tmp_path / "tokenizer.json", spec)
    with pytest.raises(CheckpointError, match=f"{message}.*use the tokenizer that belongs to the model") as error:
        read(tmp_path, top)
    assert "\n" not in str(error.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 256])
def test_byte_tokens_that_are_special_are_refused_by_name(count: int, tmp_path: Path) -> None:
    """Export had refused its own trial question, for "the special token at character 14", or not seen them."""
    top = write_checkpoint(tmp_path, "normalizer")
    spec = read_json(tmp_path / "tokenizer.json")
    names = ["<0x20>", *(f"<0x{byte:02X}>" for byte in range(256) if byte != 0x20)][:count]
    sound = spec["added_tokens"]
    marked = [{**sound[0], "id": spec["model"]["vocab"][name], "content": name} for name in names]
    more = "" if count == 1 else " and 255 more byte tokens"
    for tokens in (marked, [{**token, "special": False} for token in marked], []):
        spec["added_tokens"] = sorted([*sound, *tokens], key=lambda token: int(token["id"]))
        write_json(tmp_path / "tokenizer.json", spec)
        if tokens is not marked:
            read(tmp_path, top)
            continue
        with pytest.raises(
            CheckpointError, match=f"marks <0x..>{more} as special; byte tokens must be ordinary: remove"
        ):
            read(tmp_path, top)


@pytest.mark.slow
@pytest.mark.usefixtures("children_started")
@pytest.mark.parametrize(
    ("template", "limits", "message"),
    [
        (SLOW + VICUNA, ChildLimits(cpu_seconds=2), "takes more than 2 s of processor time to read, the limit"),
        (BIG + VICUNA, ChildLimits(memory=1 << 30), "needs more than 1.07 GB of memory to read, the limit"),
    ],
)
def test_hostile_templates_are_refused_with_the_limit(
    template: str, limits: ChildLimits, message: str, tmp_path: Path
) -> None:
    top = write_checkpoint(tmp_path, template=template)
    with pytest.raises(VtxError, match=f"{message}.*--chat-template FILE"):
        read(tmp_path, top, limits=limits)


@pytest.mark.slow
def test_templates_that_were_slow_to_compile_are_resolved(tmp_path: Path) -> None:
    """Neither ends in a limit."""
    for number, expression in enumerate(("[::1]" * 150, "|lower" * 100)):
        folder = tmp_path / str(number)
        folder.mkdir()
        top = write_checkpoint(folder, template="{% set x = 'abc'" + expression + " %}" + VICUNA)
        assert read(folder, top)[2].examples


def test_a_template_that_places_no_image_is_refused(tmp_path: Path) -> None:
    top = write_checkpoint(tmp_path, template="{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(TemplateError, match="0 times for 1 images"):
        read(tmp_path, top)
