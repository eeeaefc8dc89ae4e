"""Sources of frames: the newest is kept, those that vanish are opened again, whatever they write."""

from __future__ import annotations

import io
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.clock import Clock
from tests.support.video_files import damage, moving, write_video

from vtx.runtime.errors import ImageError
from vtx.runtime.vision.image import load_image
from vtx.tools.watch import sources
from vtx.tools.watch.config import SourceConfig, StandingQuestion, WatchConfig
from vtx.tools.watch.sources import BAD_FRAMES, FrameSource, Newest, first_frames

WAIT = 60.0  # seconds for what should happen at once, on a busy machine
QUESTION = (StandingQuestion("q", "What?"),)


class Reading:
    """A running source, with its states, and its frames as they come."""

    def __init__(self, config: SourceConfig) -> None:
        self.states = queue.Queue[tuple[str, dict[str, Any]]]()
        self.came = threading.Event()
        self.newest = Newest(config.rate, self.came.set, time.monotonic)
        self.pauses = list[float]()
        self.source = FrameSource(config, self.newest, lambda *said: self.states.put(said), pause=self._pause)

    def _pause(self, closed: threading.Event, seconds: float) -> bool:
        self.pauses.append(seconds)
        return closed.wait(0.01)

    def state(self) -> tuple[str, dict[str, Any]]:
        return self.states.get(timeout=WAIT)

    def frame(self) -> Image.Image:
        """The next frame that is not broken."""
        while True:
            assert self.came.wait(WAIT)
            self.came.clear()
            if frame := self.newest.take():
                try:
                    return load_image(frame.read())
                except ImageError:
                    self.source.corrupt += 1


@contextmanager
def reading(*, put: Callable[[Any], None] | None = None, **config: Any) -> Iterator[Reading]:
    """A source that is read; `put` gets its frames if it is given."""
    made = Reading(SourceConfig("s", QUESTION, **config))
    if put is not None:
        made.newest.put = put  # type: ignore[method-assign]
    made.source.start()
    try:
        yield made
    finally:
        made.source.close()
        made.source.thread.join(WAIT)
        assert not made.source.thread.is_alive()


def picture(path: Path, level: int, size: tuple[int, int] = (40, 30)) -> None:
    """Write a picture as others should, in one step."""
    hidden = path.with_name(f".{path.name}")
    Image.new("RGB", size, (level, level, level)).save(hidden, "png")
    hidden.rename(path)


def test_the_newest_frame_wins_and_the_others_are_counted() -> None:
    clock, changes = Clock(), list[None]()
    newest = Newest(2, lambda: changes.append(None), clock)
    for number in range(5):
        newest.put(lambda number=number: number)  # type: ignore[misc]
    frame = newest.take()
    assert frame is not None
    assert (frame.number, frame.read(), frame.at) == (5, 4, clock.now)
    assert (newest.frames, newest.dropped, len(changes)) == (5, 4, 5)
    assert newest.take() is None
    assert newest.due_from == clock.now + 0.5


def test_a_folder_gives_pictures_as_they_come_whatever_their_times_say(tmp_path: Path) -> None:
    picture(tmp_path / "old.png", 10)
    picture(tmp_path / "newer.png", 20)
    os.utime(tmp_path / "old.png", (1, 1))
    with reading(folder=str(tmp_path)) as source:
        assert source.frame().getpixel((0, 0)) == (20, 20, 20)
        picture(tmp_path / "a.png", 30, (50, 60))
        os.utime(tmp_path / "a.png", (5, 5))  # the clock was set back
        assert source.frame().size == (50, 60)
        whole = (tmp_path / "a.png").read_bytes()
        (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])  # written on the spot
        assert source.came.wait(WAIT)
        (tmp_path / "half.png").write_bytes(whole)
        assert source.frame().size == (50, 60)
        picture(tmp_path / "half.png", 90)  # replaced
        while (last := source.frame()).size != (40, 30):
            pass
        assert last.getpixel((0, 0)) == (90, 90, 90)


def test_a_folder_that_vanishes_is_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    with reading(folder=str(folder)) as source:
        state, more = source.state()
        assert (state, more["error"]) == ("lost", "No such file or directory")
        for _ in range(3):
            source.state()
        folder.mkdir()
        picture(folder / "a.png", 40)
        assert source.frame().getpixel((0, 0)) == (40, 40, 40)
        (folder / "a.png").unlink()
        folder.rmdir()
        states = [source.state() for _ in range(len(source.pauses) + 2 - 4)]
        assert "open" in dict(states)
    assert source.pauses[:4] == [1, 2, 4, 8]


def test_a_pause_grows_to_its_limit_and_starts_anew_once_frames_came(tmp_path: Path) -> None:
    with reading(folder=str(tmp_path / "none")) as source:
        for _ in range(9):
            source.state()
    assert source.pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_video_is_shown_at_its_own_times_or_faster(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    path = write_video(tmp_path / "clip.mp4")  # 90 frames, three seconds
    levels = list[float]()
    with reading(video=str(path), speed=1000) as source:
        put = source.newest.put

        def keep(read: Any) -> None:
            levels.append(float(np.asarray(read()).mean()))
            put(read)

        source.newest.put = keep  # type: ignore[method-assign]
        assert source.state() == ("open", {})
        assert source.state() == ("ended", {})
    assert levels == pytest.approx([2 * number for number in range(90)], abs=4)


def test_a_video_whose_clock_jumps_goes_on_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward by an hour, back to before the first frame: neither is waited for, and nothing is shown in a rush."""
    clock, waits = Clock(), list[float]()

    def pause(_: threading.Event, seconds: float) -> bool:
        waits.append(round(seconds, 6))
        clock.now += seconds
        return False

    times = [5.0, 6.0, 7.0, 1000.0, 1001.0, 0.0, 1.0, 3.0]

    def play(_: Any, show: Any, stopped: Any, *, damaged: Any, slowest: float) -> None:
        for seconds in times:
            show(Image.new("RGB", (4, 4)), seconds)

    monkeypatch.setattr(sources, "play", play)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=clock, time=clock, time_ns=lambda: 0))
    newest = Newest(None, lambda: None, clock)
    config = SourceConfig("s", QUESTION, video="clip.mp4", speed=2)
    source = FrameSource(config, newest, lambda *_: None, pause=pause)
    source.start()
    source.thread.join(WAIT)
    assert waits == [0, 0.5, 0.5, 0, 0.5, 0, 0.5, 1]
    assert (source.state, newest.frames) == ("ended", len(times))


TORN = object()  # a packet of a camera that is marked as corrupt


class Camera:
    """A container of FFmpeg whose packets the test gives: frames, or an error of the decoder; until it has `ended`."""

    def __init__(self) -> None:
        self.packets, self.ended = queue.SimpleQueue[Any](), threading.Event()
        self.streams = SimpleNamespace(video=[SimpleNamespace(codec_context=SimpleNamespace(name="rawvideo"))])

    def __enter__(self) -> Camera:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def demux(self, _: Any) -> Iterator[Any]:
        while not self.ended.is_set():
            with suppress(queue.Empty):
                packet = self.packets.get(timeout=0.05)
                yield SimpleNamespace(decode=partial(self._decoded, packet), pts=None, is_corrupt=packet is TORN)

    def _decoded(self, packet: Any) -> Any:
        if isinstance(packet, Exception):
            raise packet
        return [decoded(200)] if packet is TORN else packet


@pytest.fixture
def camera(monkeypatch: pytest.MonkeyPatch) -> Camera:
    av: Any = pytest.importorskip("av", reason="needs vtx-edge[video]")
    made = Camera()
    monkeypatch.setattr(av, "open", lambda *_, **__: made)
    return made


class Whole:
    """A frame that needs no other one, as of a decoder."""

    key_frame, is_corrupt, pts, side_data = True, False, None, ()


class Decoded(Whole):
    def __init__(self, frame: Any) -> None:
        self.to_image = frame.to_image


def decoded(level: int, size: tuple[int, int] = (64, 48), format: str = "yuv420p") -> Any:
    import av

    picture = np.full((size[1], size[0], 3), level, np.uint8)
    return Decoded(av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=format))


def test_a_camera_may_change_size_and_pixel_format_between_frames(camera: Camera) -> None:
    formats = ("yuv420p", "yuyv422", "nv12", "yuvj422p", "gray", "bgra", "rgb24", "yuv420p10le", "yuv420p")
    with reading(camera="/dev/video0") as source:
        for number, format in enumerate(formats):
            size = (64 + 16 * (number % 3), 48 + 8 * (number % 2))
            camera.packets.put([decoded(20 * number, size, format)])
            shown = source.frame()
            assert shown.size == size
            assert np.asarray(shown) == pytest.approx(20 * number, abs=4)
        camera.ended.set()
    assert source.source.corrupt == 0


def test_corrupt_packets_and_dropped_frames_are_passed_over_and_too_many_open_the_camera_again(camera: Camera) -> None:
    import av

    damaged = av.error.InvalidDataError(1, "Invalid data found when processing input")
    with reading(camera="/dev/video0") as source:
        camera.packets.put([])  # the first frames are often incomplete
        for packet in (*[damaged] * (BAD_FRAMES - 1), [], [decoded(40)], *[damaged] * 3):
            camera.packets.put(packet)
        assert np.asarray(source.frame()) == pytest.approx(40, abs=4)
        camera.packets.put(TORN)
        camera.packets.put([decoded(80)])
        assert np.asarray(source.frame()) == pytest.approx(80, abs=4)
        assert source.state() == ("open", {})
        assert source.source.corrupt == BAD_FRAMES + 3
        for packet in (*[damaged] * BAD_FRAMES, [decoded(120)]):
            camera.packets.put(packet)
        state, more = source.state()
        assert (state, more["retry_s"]) == ("lost", 1)
        assert more["error"].startswith(f"{BAD_FRAMES} frames in a row cannot be decoded (Invalid data")
        assert np.asarray(source.frame()) == pytest.approx(120, abs=4)
        assert source.state() == ("open", {})
        camera.ended.set()
        assert source.state()[1]["error"] == "the stream ended"


def test_a_decoded_frame_is_converted_for_one_thread_at_a_time(camera: Camera) -> None:
    """The page and the loop may ask for the same one, and the decoder's converter is not made for that."""
    inside, most, all_there = list[None](), list[int](), threading.Barrier(4)

    class Slow(Whole):
        def to_image(self, **_: int) -> Image.Image:
            inside.append(None)
            time.sleep(0.01)  # time for another thread to come in
            most.append(len(inside))
            inside.pop()
            return Image.new("RGB", (8, 8))

    def read(frame: Any) -> None:
        all_there.wait(WAIT)
        frame.read()

    with reading(camera="/dev/video0") as source:
        camera.packets.put([Slow()])
        assert source.came.wait(WAIT)
        threads = [threading.Thread(target=read, args=(source.newest.last,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        camera.ended.set()
    assert most == [1] * 4


def test_a_frame_that_cannot_be_converted_is_an_error_of_its_own(camera: Camera) -> None:
    class Broken(Whole):
        def to_image(self, **_: int) -> Any:
            raise ValueError("no such format")

    with reading(camera="/dev/video0") as source:
        camera.packets.put([Broken()])
        camera.packets.put([decoded(60)])
        assert np.asarray(source.frame()) == pytest.approx(60, abs=4)
        camera.ended.set()


def test_a_video_that_is_none_ends_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"no video at all" * 10)
    with reading(video=str(tmp_path / "clip.mp4")) as source:
        state, more = source.state()
    assert state == "ended"
    assert "is not a video of a known format" in more["error"]


def test_a_stream_that_breaks_off_is_opened_again_and_may_change_its_size(tmp_path: Path) -> None:
    av: Any = pytest.importorskip("av", reason="needs vtx-edge[video]")
    path = tmp_path / "clip.ts"
    write_video(path, codec="mpeg2video", frames=30)
    assert av
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for content in (path.read_bytes(), b"\0" * 100_000, path.read_bytes()):
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(content)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with reading(stream=f"tcp://127.0.0.1:{listening.getsockname()[1]}") as source:
            assert source.state() == ("open", {})
            assert source.frame().size == (64, 48)
            said = [source.state() for _ in range(3)]
        thread.join(WAIT)
    assert [state for state, _ in said] == ["lost", "lost", "open"]
    assert said[0][1]["error"] == "the stream ended"
    assert said[1][1]["error"]
    assert source.pauses[:2] == [1, 2]


def jpeg(mode: str, size: tuple[int, int], level: int) -> bytes:
    """A picture as a camera sends it; in colour at the full resolution of colours if it is 90 or brighter."""
    file, more = io.BytesIO(), {} if mode == "L" else {"subsampling": 0 if level >= 90 else 2}
    Image.new("RGB", size, (level, level, level)).convert(mode).save(file, "jpeg", **more)
    return file.getvalue()


@contextmanager
def sent_once(head: bytes, content: bytes) -> Iterator[int]:
    """The port of a server that sends this to its first client, to HTTP's after the request, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                if head:
                    connection.recv(1 << 16)
                connection.sendall(head + content)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


def all_of(address: str) -> tuple[list[tuple[str, Image.Image]], int]:
    """Every frame of a stream up to its end, with its format of pixels, and how many could not be decoded."""
    frames = list[tuple[str, Image.Image]]()
    with reading(
        put=lambda read: frames.append((read.args[0].format.name, load_image(read()))), stream=address
    ) as source:
        assert source.state() == ("open", {})
        assert source.state()[0] == "lost"
    return frames, source.source.corrupt


def test_a_camera_changes_size_and_format_of_pixels_and_sends_broken_frames() -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    wide, fine, grey = jpeg("RGB", (64, 48), 40), jpeg("RGB", (96, 80), 90), jpeg("L", (32, 40), 160)
    sent = [wide] * 4 + [b"no picture"] * 3 + [fine] * 4 + [fine[:60]] * 2 + [grey] * 4 + [wide] * 2
    head = b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=next\r\n\r\n"
    parts = (b"--next\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(s), s) for s in sent)
    with sent_once(head, b"".join(parts)) as port:
        frames, corrupt = all_of(f"http://127.0.0.1:{port}/")
    shown = [(kind, image.size, round(float(np.asarray(image).mean()))) for kind, image in frames]
    assert sorted(set(shown), key=shown.index) == [
        ("yuvj420p", (64, 48), 40), ("yuvj444p", (96, 80), 90), ("gray", (32, 40), 160),
    ]  # fmt: skip
    assert shown[-1] == shown[0], "it goes back to the first"
    assert corrupt == 5


def test_pictures_cut_off_by_a_camera_are_counted_and_not_shown() -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "jpeg")
    whole = file.getvalue()
    half = whole[: len(whole) // 2]
    sent = [
        whole,
        half,
        whole,
        whole,
        half,
        half + b"\xff\xd9",
        whole,
        whole,
    ]  # the last one is lost with the connection
    head = b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=next\r\n\r\n"
    parts = (b"--next\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(s), s) for s in sent)
    with sent_once(head, b"".join(parts)) as port:
        frames, corrupt = all_of(f"http://127.0.0.1:{port}/")
    assert (len(frames), corrupt) == (4, 3)
    assert all(np.array_equal(np.asarray(image), np.asarray(frames[0][1])) for _, image in frames)


class Snapshots(BaseHTTPRequestHandler):
    """A camera that answers each request with one picture, brighter each time; the third is cut off."""

    count = 0

    def do_GET(self) -> None:
        Snapshots.count += 1
        content = jpeg("RGB", (64, 48), 20 * Snapshots.count)
        content = content[: len(content) // 2] if Snapshots.count == 5 else content
        self.send_response(200)
        self.send_header("Content-Type", "image/jpeg")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_an_address_of_one_picture_is_asked_again_and_again() -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Snapshots)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    enough, shown = threading.Event(), list[int | str]()

    def put(read: Any) -> None:
        try:
            shown.append(round(float(np.asarray(load_image(read())).mean())))
        except ImageError as e:
            shown.append(str(e))
        if len(shown) == 6:
            enough.set()

    with reading(put=put, stream=f"http://127.0.0.1:{server.server_port}/snap.cgi?ch=1", rate=50) as source:
        assert source.state() == ("open", {})
        assert enough.wait(WAIT)
    server.shutdown()
    server.server_close()
    levels = [level for level in shown if isinstance(level, int)]
    assert len(levels) >= 5
    assert levels == sorted(set(levels)), "each request gives a new picture"
    assert [level for level in shown if isinstance(level, str) and "damaged" in level]


def test_frames_predicted_from_a_damaged_one_are_counted_and_not_shown(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    content = bytearray(moving(tmp_path / "clip.mkv", frames=36, every=12))
    damage(content, packet=15)
    (tmp_path / "clip.mkv").write_bytes(content)
    frames = list[Image.Image]()
    with reading(put=lambda read: frames.append(read()), video=str(tmp_path / "clip.mkv"), speed=10) as source:
        assert source.state() == ("open", {})
        assert source.state() == ("ended", {})
    assert source.source.corrupt == 9, "frames 15 to 23; the key frame is 24"
    assert len(frames) == 27


@pytest.mark.parametrize("codec", ["mpeg2video", "mpeg4"])
def test_a_stream_that_loses_and_damages_packets_goes_on_to_its_last_frame(tmp_path: Path, codec: str) -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    content, random = write_video(tmp_path / "clip.ts", codec=codec).read_bytes(), np.random.default_rng(0)
    packets = [content[at : at + 188] for at in range(0, len(content), 188)]
    for number in range(20, len(packets) * 3 // 4):
        if number % 7 == 0:
            packets[number] = b""
        elif number % 7 == 3:
            packets[number] = packets[number][:8] + random.bytes(180)
    with sent_once(b"", b"".join(packets)) as port:
        frames, _ = all_of(f"tcp://127.0.0.1:{port}")
    assert 10 < len(frames) < 90
    assert np.asarray(frames[-1][1]).mean() == pytest.approx(2 * 89, abs=4), "the last frame of the film"


def test_a_frame_of_which_a_packet_was_lost_is_counted_and_not_shown(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    content = moving(tmp_path / "clip.ts", frames=90, every=12)
    packet = len(content) // 188 * 2 // 3  # of a key frame
    shown, corrupt = list[list[bytes]](), 0
    for stream in (content, content[: packet * 188] + content[(packet + 1) * 188 :]):
        with sent_once(b"", stream) as port:
            frames, corrupt = all_of(f"tcp://127.0.0.1:{port}")
        shown.append([picture.tobytes() for _, picture in frames])
    assert len(shown[1]) + corrupt == len(shown[0])
    assert corrupt > 11, "all that is predicted from it"
    assert set(shown[1]) <= set(shown[0]), "a frame with parts of others is shown"


def test_frames_of_a_stream_are_turned_upright(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    written = write_video(tmp_path / "clip.mp4", frames=5, top=100, options={"movflags": "faststart"})
    content = bytearray(written.read_bytes())
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)  # a pixel at (x, y) is shown at (-y, x)
    at = content.index(b"tkhd") + 44
    content[at : at + len(matrix)] = matrix
    with sent_once(b"", bytes(content)) as port:
        frames, _ = all_of(f"tcp://127.0.0.1:{port}")
    shown = np.asarray(frames[-1][1].convert("L"), np.float32)
    assert shown.shape == (64, 48)
    assert shown[:, 24:].mean() > shown[:, :24].mean() + 50, "the upper half is on the right"


def test_the_user_and_password_of_a_stream_are_not_told() -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    with reading(stream="rtsp://user:secret@127.0.0.1:1/live") as source:
        state, more = source.state()
    assert (state, "secret" in str(more)) == ("lost", False)


def test_a_check_tells_the_size_of_each_first_frame_or_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs vtx-edge[video]")
    picture(tmp_path / "a.png", 10)
    config = WatchConfig((
        SourceConfig("folder", QUESTION, folder=str(tmp_path)),
        SourceConfig("none", QUESTION, folder=str(tmp_path / "none")),
        SourceConfig("camera", QUESTION, camera="/dev/no-camera"),
    ))  # fmt: skip
    seen = dict(first_frames(config, ("PNG",)))
    assert seen["folder"] == (40, 30)
    assert [str(seen[name]) for name in ("none", "camera")] == ["No such file or directory"] * 2
