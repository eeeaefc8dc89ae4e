"""Checkpoints of the hub: what is fetched when, and how it fails."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import COMMIT, CONFIG, make, make_cache
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.runtime.errors import CheckpointError, DeviceError, UnsupportedModelError

WEIGHTS = (
    "model.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors", "policy_model.safetensors",
)  # fmt: skip
STATISTICS = "policy_preprocessor_step_5_normalizer_processor.safetensors"  # as LeRobot names them


@pytest.mark.parametrize(
    "model", ["", ".", "..", "./here", "../here", "a/b/c", "/no/where", "a b", "a\0b", "~/x", "é/b"]
)
def test_what_is_neither_directory_nor_hub_id_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such directory, and not a hub id|holds no config\.json"):
        open_checkpoint(model)


@pytest.fixture
def hub() -> Any:
    return pytest.importorskip("huggingface_hub")


def test_a_hub_model_is_fetched_settings_first_and_weights_at_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any
) -> None:
    snapshot = make_cache(tmp_path)
    calls: list[tuple[str, str | None, list[str]]] = []

    def download(
        repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str] | None
    ) -> str:
        calls.append((repo, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    lines: list[str] = []
    assert open_checkpoint("org/name", progress=lines.append).revision == COMMIT
    assert [call[:2] for call in calls] == [("org/name", None), ("org/name", COMMIT)]
    assert not any(fnmatch(name, pattern) for name in WEIGHTS for pattern in calls[0][2])
    assert [pattern for pattern in calls[0][2] if fnmatch(STATISTICS, pattern)] == [
        pattern for pattern in calls[0][2] if "safetensors" in pattern
    ]
    assert all(any(fnmatch(name, pattern) for pattern in calls[1][2]) for name in WEIGHTS[:2])
    patterns = [pattern for call in calls for pattern in call[2]]
    assert not any(pattern.endswith(("bin", "py", "pt", "*")) for pattern in patterns)
    assert len(lines) == 2


def test_pickles_are_fetched_from_the_hub_for_want_of_safetensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any
) -> None:
    snapshot = make_cache(tmp_path)
    wanted: list[str] = []

    def download(_: str, *, allow_patterns: list[str], **__: object) -> str:
        wanted.extend(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    open_checkpoint("org/name", allow_pickle=True)
    assert "pytorch_model*.bin" not in wanted
    for weights in snapshot.glob("model*"):
        weights.unlink()
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        open_checkpoint("org/name")
    assert "pytorch_model*.bin" not in wanted
    with pytest.raises(CheckpointError, match=r"holds neither model.safetensors nor"):
        open_checkpoint("org/name", allow_pickle=True)
    assert "pytorch_model*.bin" in wanted


def test_a_hub_model_that_cannot_be_exported_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any
) -> None:
    folder = make(tmp_path, CONFIG | {"model_type": "qwen2_vl"})
    calls: list[object] = []

    def download(*arguments: object, **_: object) -> str:
        calls.append(arguments)
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(UnsupportedModelError, match="qwen2_vl"):
        open_checkpoint("org/name")
    assert len(calls) == 1


def test_without_a_network_the_hub_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any
) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="not in the local cache and the hub is unreachable; go online"):
        open_checkpoint("org/name")


def test_without_huggingface_hub_a_hub_id_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DeviceError, match=r'pip install "vtx-edge\[export\]"'):
        open_checkpoint("org/name")
