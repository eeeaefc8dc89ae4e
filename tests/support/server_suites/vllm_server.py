"""A pytest plug-in: the suite of vLLM starts vtx-serve instead.

Of their options only the name of the model stays. What tests import of vLLM itself, of PyTorch and of transformers is
replaced by empty names: only tests that ask over HTTP apply.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import socket
import sys
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest
from verdicts import *  # noqa: F403 - the hooks of that plug-in are hooks of this one
from vtx_serve import start, stop

EMPTY = ("vllm", "torch", "transformers", "tblib", "fastapi", "tests")
PICTURE = "data:image/jpeg;base64," + b64encode(Path(os.environ["VTX_PICTURE"]).read_bytes()).decode()
TOKENS = 320  # of the bundle's vocabulary
LONG = SimpleNamespace(min=-(2**63), max=2**63 - 1)


class RemoteOpenAIServer:
    """A vtx-serve process, with the methods that their tests call."""

    def __init__(self, model: str, *_: Any, **__: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._process = start([model], "127.0.0.1", self._port, "--max-tokens", "1000")
        self.url_root = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._process)

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._settings(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._settings(options))

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url_for("v1"), "api_key": "none", "max_retries": 0, "timeout": 120, **options}


class Empty(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NAMES.get(name) or MagicMock(name=name)


NAMES = {
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "TEST_IMAGE_ASSETS": ["one.jpg", "two.jpg", "three.jpg", "four.jpg"],
    "ROCM_EXTRA_ARGS": [],
    "encode_image_url": lambda _: PICTURE,
    "ModelConfig": lambda **_: SimpleNamespace(get_vocab_size=lambda: TOKENS),
    "iinfo": lambda _: LONG,
    "VLLMValidationError": ValueError,
    "EngineDeadError": RuntimeError,
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages in EMPTY, and in them every module but the suite's own."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        package = name.partition(".")[0]
        if package not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


sys.meta_path.insert(0, Finder())


class Assets:
    """Instead of their server of pictures."""

    def get_image_asset(self, name: str) -> str:
        return name

    def url_for(self, name: str) -> str:
        return PICTURE


@pytest.fixture(scope="session")
def local_asset_server() -> Assets:
    return Assets()


@pytest.fixture
def image_url(request: pytest.FixtureRequest) -> str:
    return PICTURE


@pytest.fixture
def image_urls(request: pytest.FixtureRequest) -> list[str]:
    return [PICTURE for _ in request.param]


@pytest.fixture(scope="session")
def zephyr_lora_files() -> str:
    return ""
