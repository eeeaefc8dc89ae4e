"""Videos over HTTP: answers as in Python, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.session.test_videos import VIDEO_LLAVA
from tests.runtime.vision.test_video import write
from tests.support.bundles import export
from tests.support.serving import Served, asking, data_url, serving, user
from tests.support.tiny import random_image
from vtx.runtime.api.load import load

QUESTION = {"type": "text", "text": "What happens?"}


@pytest.fixture(scope="module")
def bundles(
    packages: None, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return {"tiny": export(tiny_checkpoint(VIDEO_LLAVA), folder / "bundle").folder}


@pytest.fixture(scope="module")
def served(bundles: dict[str, Path]) -> Iterator[Served]:
    with serving(bundles) as running:
        yield running


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("video") / "clip.mp4")


def part(content: bytes, kind: str = "video/mp4", **more: Any) -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "video_url", "video_url": {"url": url, **more}}


def test_a_conversation_about_a_video_and_an_image_is_answered_as_in_python(
    served: Served, bundles: dict[str, Path], clip: Path
) -> None:
    """The template prints the image first, so the order of the request is not that of the tokens."""
    image = {"type": "image_url", "image_url": {"url": data_url(random_image(0))}}
    said = [{"role": "assistant", "content": "it is red"}, {"role": "user", "content": "And then?"}]
    messages = [{"role": "user", "content": [part(clip.read_bytes(), frames=3), image, QUESTION]}, *said]
    got = served.chat(asking(*messages, k=5)).json["usage"]
    again = served.chat(asking(*messages, k=5)).json["usage"]
    with load(bundles["tiny"], device="cpu", threads=1) as model:
        wanted = model.generate(messages, 5, max_new_tokens=8, ignore_eos=True)
    assert got["vtx"]["token_ids"] == again["vtx"]["token_ids"] == list(wanted.token_ids)
    assert got["vtx"]["vision_tokens"] == wanted.stats.vision_tokens == 16 + 3 * 17
    assert again["prompt_tokens_details"]["cached_tokens"] > 16 + 3 * 17


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "video_url", "video_url": {"url": "https://pictures.example/a.mp4"}}, "fetches no videos"),
        ({"type": "video_url", "video_url": {"url": "/etc/passwd"}}, "opens no files"),
        (part(b"\x89PNG", "image/png"), "holds image/png, not a video"),
        (part(b"no video"), "is not a video of a known format"),
        (part(b"", frames=65), "frames is 65, the limit is 64"),
        ({"type": "video_url"}, "must be a data URL"),
        ({"type": "video", "video": "clip.mp4"}, "of type text, image_url or video_url"),
    ],
    ids=["address", "path", "image", "text", "frames", "nothing", "file"],
)  # fmt: skip
def test_what_is_no_video_is_refused(served: Served, given: dict[str, Any], says: str) -> None:
    response = served.chat(asking({"role": "user", "content": [given, QUESTION]}))
    assert response.status == 400
    assert says in response.json["error"]["message"]


def test_a_model_without_videos_refuses_them(tiny_bundle: Path, clip: Path) -> None:
    with serving({"tiny": tiny_bundle}) as running:
        response = running.chat(asking({"role": "user", "content": [part(clip.read_bytes()), QUESTION]}))
        assert running.chat(asking(user("red?", random_image(0)))).status == 200
    assert response.status == 400
    assert "takes no videos" in response.json["error"]["message"]
