"""The page of endpoints and fields is what the server has."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.serving import serving
from vtx.runtime.api.options import Options
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.openai import request
from vtx.runtime.server.openai.fields import ChatFields
from vtx.runtime.server.openai.request import read_request
from vtx.runtime.server.refusal import Refusal
from vtx.runtime.session.sampling import Sampling

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "endpoints.md"


def table(heading: str) -> set[str]:
    """The names in the first column of a table."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_address_of_the_server_is_on_the_page(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        told = served.request("GET", "/nothing").json["error"]["message"].partition("there is ")[2]
    assert set(told.split(", ")) == table("Addresses")


def test_the_fields_on_the_page_are_those_that_the_server_takes() -> None:
    openai = pytest.importorskip("openai", reason="needs the openai package, of the extra dev")
    calls = (openai.resources.chat.Completions.create, openai.resources.Completions.create)
    tree = ast.parse(inspect.getsource(request))
    candidates = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
    candidates = {name for name in candidates if re.fullmatch("[a-z_]+", name)}
    candidates |= {name for call in calls for name in inspect.signature(call).parameters}
    candidates |= {field.name for kind in (Options, Sampling, ChatFields) for field in fields(kind)}
    listed = table("Fields of a chat completion") - {"image_url"}
    taken = set()
    for name in candidates | listed:
        body = {"model": "a", "messages": [{"role": "user", "content": "?"}], name: {"no": ["such", "value"]}}
        try:
            read_request(json.dumps(body).encode(), Limits())
            taken.add(name)
        except Refusal as e:
            taken |= set() if (e.code, e.param) == ("unknown_parameter", name) else {name}
    assert taken == listed
