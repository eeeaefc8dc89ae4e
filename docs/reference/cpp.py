"""Writes docs/reference/cpp.md from libvtx's headers: `python docs/reference/cpp.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
HEADERS = PAGE.parents[2] / "runtime/cpp/include/vtx"
HEAD = """# libvtx: C++ and C

Generated from the headers by `python docs/reference/cpp.py`; a test compares them. [Answer from C++](../how-to/cpp.md)
shows how to use them."""
SECTION = re.compile(r"^/\* ---- (\w+)[^\n]*\*/\n", re.MULTILINE)
TYPE = re.compile(r"^((?://[^\n]*\n)*)(class|struct) (\w+)[^\n]*\{\n(.*?)^\};\n", re.MULTILINE | re.DOTALL)


def pages() -> dict[Path, str]:
    """The text of the page."""
    parts = [HEAD, "## C++: `vtx/vtx.hpp`"]
    for comment, kind, name, body in TYPE.findall((HEADERS / "vtx.hpp").read_text(encoding="utf-8")):
        text = f"{comment}{kind} {name} {{\n{body}}};" if kind == "struct" else f"{comment}{_class(name, body)}"
        parts.append(f"### vtx::{name}\n\n```cpp\n{text}\n```")
    first, *sections = SECTION.split((HEADERS / "vtx.h").read_text(encoding="utf-8"))
    parts.append("## C: `vtx/vtx.h`")
    parts.append(f"### Library\n\n```c\n{_declarations(first)}\n```")
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        parts.append(f"### C {title}\n\n```c\n{_declarations(text)}\n```")
    return {PAGE: "\n\n".join(parts) + "\n"}


def _declarations(text: str) -> str:
    """A part of the C header without what is there for the compiler."""
    lines = [line.replace("VTX_API ", "") for line in text.splitlines()]
    kept = [line for line in lines if not re.match(r'#(?!define VTX_API_VERSION)|extern "C"|\}$', line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _class(name: str, body: str) -> str:
    """A class's public part, functions without their bodies."""
    public = body.partition(" public:\n")[2].partition(" private:\n")[0].rstrip()
    return "\n".join([f"class {name} {{", " public:", *_members(public), "};"])


def _members(text: str) -> Iterator[str]:
    """Comments, and declarations as far as their bodies or initialisers."""
    depth, declared = 0, list[str]()
    for line in text.splitlines():
        if depth == 0 and (not line.strip() or line.lstrip().startswith("//")):
            yield line
            continue
        if depth == 0:
            declared.append(line)
            joined = "\n".join(declared)
            opened = re.search(r"\)[^{;]*?(\s:\s|\s?\{)", joined)
            if opened or joined.endswith(";"):
                cut = joined[: opened.start(1)].rstrip() if opened else joined[:-1]
                yield f"{cut};"
                declared.clear()
        depth += line.count("{") - line.count("}")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
