"""Videos over HTTP: answers as in Python, and what is refused."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import export
from tests.support.families.videos import VIDEO_LLAVA
from tests.support.fixtures import Checkpoints
from tests.support.serving import WAIT, Served, asking, data_url, serving, until, user
from tests.support.tiny import random_image
from tests.support.video_files import write_video
from vtx.runtime.api.load import load
from vtx.runtime.host import confined
from vtx.runtime.server.limits import Limits
from vtx.runtime.vision import video as reading

QUESTION = {"type": "text", "text": "What happens?"}


@pytest.fixture(scope="module")
def bundles(packages: None, tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return {"tiny": export(tiny_checkpoint(VIDEO_LLAVA), folder / "bundle").folder}


@pytest.fixture(scope="module")
def served(bundles: dict[str, Path]) -> Iterator[Served]:
    with serving(bundles) as running:
        yield running


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "clip.mp4")


def part(content: bytes, kind: str = "video/mp4", **more: Any) -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "video_url", "video_url": {"url": url, **more}}


@pytest.mark.slow
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
        (part(b"", frames=257), "frames is 257, the limit is 256"),
        ({"type": "video_url"}, "has no video_url"),
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


def test_a_title_that_is_not_utf8_is_answered(served: Served, clip: Path) -> None:
    content = write_video(clip.with_name("titled.mp4"), frames=9, title="M__ller").read_bytes()
    assert b"M__ller" in content
    video = part(content.replace(b"M__ller", "Müllers".encode("latin-1")), frames=3)
    assert served.chat(asking({"role": "user", "content": [video, QUESTION]})).status == 200


def test_a_decoder_that_crashes_harms_only_its_request(
    served: Served, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asking({"role": "user", "content": [part(clip.read_bytes()), QUESTION]})
    with monkeypatch.context() as patch:
        patch.setattr(reading, "CHILD", "tests.support.video_faults:crash")
        response = served.chat(asked)
    assert response.status == 400
    assert "crashes the process that reads it" in response.json["error"]["message"]
    assert served.chat(asked).status == 200


def test_a_client_that_leaves_ends_the_decoding_of_its_video(
    served: Served, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next video does not wait for it, which it would until the decoder's limit of time."""
    cancelled = served.metrics()["vtx_cancelled_total"]
    asked = asking({"role": "user", "content": [part(clip.read_bytes()), QUESTION]})
    begun, confine = threading.Event(), confined.confine

    def noted(*given: Any, **options: Any) -> Any:
        begun.set()
        return confine(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "CHILD", "tests.support.video_faults:hang")
        patch.setattr(confined, "confine", noted)
        with served.open_chat(asked):
            assert begun.wait(WAIT), "the video is being decoded"
        until(lambda: served.metrics()["vtx_cancelled_total"] == cancelled + 1, "the request is cancelled")
    assert served.chat(asked).status == 200


def test_a_video_ends_at_the_time_limit_of_its_request(
    bundles: dict[str, Path], clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHILD", "tests.support.video_faults:hang")
    with serving(bundles, Limits(seconds=1)) as running:
        response = running.chat(asking({"role": "user", "content": [part(clip.read_bytes()), QUESTION]}))
    assert response.status == 408
