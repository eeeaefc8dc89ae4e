"""Messages with videos as the suites write them, given to both plug-ins; stand-ins replace the suites' modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.exported import Models
from tests.support.families.videos import NEXT_VIDEO
from tests.support.tiny import Tiny
from tests.support.video_files import write_video

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
QUESTION = "What moves?"


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: str, name: str, **modules: dict[str, Any]) -> Any:
    """The plug-in's module, imported over modules with these names and contents."""
    for dotted, contents in modules.items():
        parts = dotted.split("__")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        vars(sys.modules[".".join(parts)]).update(contents)
    monkeypatch.syspath_prepend(PLUGINS / folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def clip(tmp_path: Path) -> str:
    return str(write_video(tmp_path / "clip.mp4"))


@pytest.mark.slow
def test_a_task_of_lmms_eval_that_shows_a_video(monkeypatch: pytest.MonkeyPatch, models: Models, clip: str) -> None:
    results = {"GenerationResult": lambda text, counts: text, "TokenCounts": SimpleNamespace, "Instance": object}
    plugin = stand_in(
        monkeypatch, "lmms-eval", "vtx_lmms_eval", lmms_eval__api__instance=results,
        lmms_eval__api__model={"lmms": object}, lmms_eval__models__registry_v2={"ModelManifest": SimpleNamespace},
    )  # fmt: skip
    model = models(NEXT_VIDEO, ks=(3,))
    asked = plugin.Vtx(str(model.bundle.folder), device="cpu", threads=1)
    text: dict[str, str] = {"type": "text", "text": QUESTION}
    shown = [{"role": "user", "content": [{"type": "video", "url": clip}, text]}]
    asked.task_dict = {"task": {"test": ["a document"]}}
    request = SimpleNamespace(args=(None, lambda _: shown, {"max_new_tokens": 4}, 0, "task", "test"))
    expected = model.generate([{"role": "user", "content": [{"type": "video", "video": clip}, text]}], max_new_tokens=4)
    assert asked.generate_until([request, request]) == [expected.text, expected.text]
    shown[0]["content"][0] = {"type": "audio", "url": clip}  # type: ignore[index]
    with pytest.raises(ValueError, match="shows a audio; vtx sees texts, images and videos"):
        asked.generate_until([request])


@pytest.mark.sampled
@pytest.mark.parametrize("tiny", [NEXT_VIDEO, Tiny()], ids=["videos", "images alone"])
def test_vlmevalkit_shows_videos_to_models_that_take_them(
    monkeypatch: pytest.MonkeyPatch, models: Models, clip: str, tiny: Tiny
) -> None:
    plugin = stand_in(
        monkeypatch, "vlmevalkit", "vtx_vlmevalkit", vlmeval__vlm__base={"BaseModel": object},
    )  # fmt: skip
    model = models(tiny, ks=(3,))
    asked = plugin.Vtx(str(model.bundle.folder), device="cpu", threads=1, max_new_tokens=4)
    assert tiny == NEXT_VIDEO or not asked.VIDEO_LLM
    if asked.VIDEO_LLM:
        message = [{"type": "video", "value": clip}, {"type": "text", "value": QUESTION}]
        content = [{"type": "video", "video": clip}, {"type": "text", "text": QUESTION}]
        expected = model.generate([{"role": "user", "content": content}], max_new_tokens=4)
        assert asked.generate_inner(message) == expected.text
