"""Video files: which frames are read, and what is refused before and while it is decoded."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support.exported import Models
from tests.support.families.videos import VIDEO_LLAVA
from tests.support.tiny import random_image
from tests.support.video_files import FRAMES, RATE, damage, moving, write_video
from vtx import cli
from vtx.runtime.errors import DeviceError, ImageError, RequestError
from vtx.runtime.vision import video as reading
from vtx.runtime.vision.decoding import conversion, decoded
from vtx.runtime.vision.frame_sampling import FrameSampling, SampledFrames, evenly
from vtx.runtime.vision.limits import MAX_VIDEO_MEMORY
from vtx.runtime.vision.video import Video, as_video, load_frames

av: Any = pytest.importorskip("av", reason="the [video] extra is not installed")

PADDED = FrameSampling(8, padded=True)


def levels(source: Any, wanted: int = 8) -> list[float]:
    return load_frames(Video(source), FrameSampling(wanted), lambda frame: float(np.asarray(frame).mean()))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "clip.mp4")


def test_a_short_file_begins_with_black_frames_where_the_layout_says_so(tmp_path: Path) -> None:
    path = write_video(tmp_path / "short.mp4", frames=5, top=100)
    seen = load_frames(Video(path), PADDED, lambda frame: (frame.size, float(np.asarray(frame).mean())))
    assert [size for size, _ in seen] == [(64, 48)] * 8
    assert [level for _, level in seen] == pytest.approx([0, 0, 0, 50, 52, 54, 56, 58], abs=4)
    long = load_frames(Video(write_video(tmp_path / "long.mp4")), PADDED, lambda f: float(np.asarray(f).mean()))
    assert long == pytest.approx([2 * place for place in evenly(8, 0, FRAMES - 1, padded=True)], abs=4)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.avi"])
def test_the_sampled_frames_are_read(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / name)
    assert levels(path) == pytest.approx([2 * place for place in evenly(8, 0, FRAMES - 1)], abs=4)
    assert levels(path.read_bytes(), 3) == pytest.approx([0, 88, 178], abs=4)


@pytest.mark.parametrize("codec", ["libx264", "libvpx-vp9"])
def test_usual_codecs_are_read(tmp_path: Path, codec: str) -> None:
    path = write_video(tmp_path / "clip.mp4", codec=codec, frames=12)
    assert levels(path, 3) == pytest.approx([0, 10, 22], abs=4)


QUARTERS = [(1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)]
MIRRORED = [(-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)]


@pytest.mark.parametrize("matrix", QUARTERS + MIRRORED, ids=str)
def test_a_frame_is_turned_and_mirrored_upright(tmp_path: Path, matrix: tuple[int, int, int, int]) -> None:
    """As QuickTime's format states it: a pixel at (x, y) is shown at (a x + c y, b x + d y), and moved into view."""
    content = bytearray(moving(tmp_path / "clip.mp4", frames=1, every=1))
    stored = load_frames(Video(bytes(content)), FrameSampling(1), np.asarray)[0]
    at = content.index(b"tkhd") + 4 + 40
    a, b, c, d = matrix
    rows = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    content[at : at + 36] = b"".join(number.to_bytes(4, "big", signed=True) for number in rows)
    y, x = np.indices(stored.shape[:2])
    right, down = a * x + c * y, b * x + d * y
    right, down = right - right.min(), down - down.min()
    wanted = np.zeros((down.max() + 1, right.max() + 1, 3), np.uint8)
    wanted[down, right] = stored
    (frame,) = load_frames(Video(bytes(content)), FrameSampling(1), np.asarray)
    np.testing.assert_array_equal(frame, wanted)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
def test_the_length_of_a_video_with_a_variable_rate_is_that_of_its_times(tmp_path: Path, suffix: str) -> None:
    """Frames come in bursts: as many as the clip has seconds are sampled, from all containers the same."""
    milliseconds = [0, 33, 66, 100, 133, 2000, 2033, 4000, 6000, 7000, 8000, 8033, 8066, 9000, 10000]
    path, codec = tmp_path / f"clip.{suffix}", "libvpx-vp9" if suffix == "webm" else "libx264"
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for number, time in enumerate(milliseconds):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 15 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    clips = list[SampledFrames]()
    load_frames(Video(path), FrameSampling(64, a_second=1.0), np.asarray, begun=clips.append)
    assert len(clips[-1].numbers) == 10
    assert clips[-1].count / clips[-1].rate == pytest.approx(10, abs=0.1)


def test_the_last_frame_counts_for_as_long_as_it_is_shown(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "clip.mkv"), "w") as file:
        stream = file.add_stream("libvpx-vp9", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        packets = list[Any]()
        for time in (0, 1000, 2000):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 100, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            packets += stream.encode(frame)
        packets += stream.encode()
        packets[-1].duration = 8000
        file.mux(packets)
    clips = list[SampledFrames]()
    load_frames(Video(tmp_path / "clip.mkv"), FrameSampling(3), np.asarray, begun=clips.append)
    assert clips[-1].count / clips[-1].rate == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.avi"])
def test_a_steady_rate_is_the_one_that_the_file_states(tmp_path: Path, name: str) -> None:
    clips = list[SampledFrames]()
    load_frames(Video(write_video(tmp_path / name)), FrameSampling(2), np.asarray, begun=clips.append)
    assert clips[-1].rate == RATE


def test_times_beyond_the_limit_are_refused_whatever_the_file_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "clip.mkv")
    content = bytearray(path.read_bytes())
    at = content.index(b"\x44\x89\x88") + 3  # the duration of the segment, a double
    struct.pack_into(">d", content, at, 100.0)
    monkeypatch.setattr(reading, "MAX_VIDEO_SECONDS", 2)
    with pytest.raises(ImageError, match="takes 3 seconds, the limit is 2"):
        levels(bytes(content))


def test_a_damaged_frame_among_the_sampled_is_refused_and_its_number_is_named(tmp_path: Path) -> None:
    content = bytearray(moving(tmp_path / "clip.mkv", frames=36, every=12))
    damage(content, packet=15)
    assert len(levels(bytes(content), 1)) == 1
    with pytest.raises(ImageError, match=r"damaged after (15|1[6-9]|2[0-3]) frames \(.+\); copy or save it again"):
        levels(bytes(content), 12)


def test_a_key_frame_of_before_the_damage_does_not_end_it() -> None:
    """Decoders return frames later than they get their packets."""

    def packet(time: int, *frames: tuple[int, bool]) -> Any:
        decoded_frames = [SimpleNamespace(pts=pts, key_frame=key, is_corrupt=False) for pts, key in frames]
        return SimpleNamespace(pts=time, is_corrupt=False, decode=lambda: decoded_frames)

    def fail() -> Any:
        raise av.error.InvalidDataError(1, "invalid data")

    lost = SimpleNamespace(pts=2, is_corrupt=False, decode=fail)
    packets = [packet(1), lost, packet(3, (0, True)), packet(4, (1, False), (3, False)), packet(5, (5, True))]
    shown = [frame.pts for frame, damage in decoded(packets) if damage is None]
    assert shown == [5]


def test_half_a_jpeg_in_a_video_is_refused(tmp_path: Path) -> None:
    content = bytearray(_elementary(tmp_path / "clip.avi", (160, 120), noise=True).read_bytes())
    assert len(levels(bytes(content), 5)) == 5
    third = [match.start() for match in re.finditer(b"\xff\xd8\xff", content)][2]
    content[third + 4000 : third + 4002] = b"\xff\xd9"
    for number in (5, 2):  # among the sampled frames, and between them
        with pytest.raises(ImageError, match=r"damaged after [23] frames"):
            levels(bytes(content), number)


def test_content_decides_what_is_a_video(clip: Path, tmp_path: Path) -> None:
    picture = tmp_path / "photo.mp4"
    random_image(0).save(picture, "PNG")
    assert as_video(clip.rename(tmp_path / "clip.jpg"))
    assert as_video(np.zeros((2, 4, 4, 3), np.uint8))
    assert not as_video(np.zeros((4, 4, 3), np.uint8))
    assert not as_video(tmp_path / "absent.mp4")
    (tmp_path / "clip.jpg").rename(clip)
    with pytest.raises(ImageError, match=r"photo\.mp4' is not a video of a known format; vtx reads MP4"):
        levels(picture)


def test_a_playlist_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_text("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n")
    with pytest.raises(ImageError, match="is not a video of a known format"):
        levels(tmp_path / "clip.mp4")


def test_a_file_without_a_video_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="has no video stream"):
        levels(write_video(tmp_path / "sound.mp4", sound=True))


def test_a_file_without_frames_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"has no frames|cut off"):
        levels(write_video(tmp_path / "empty.mkv", frames=0))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("place", ["end", "start"])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float, place: str) -> None:
    """With the index at the end nothing can be read, with the index at the start some frames are missing."""
    options = {"movflags": "faststart"} if place == "start" else None
    content = write_video(tmp_path / "clip.mp4", options=options).read_bytes()
    with pytest.raises(ImageError, match=r"damaged|cut off"):
        levels(content[: int(len(content) * share)])


def test_noise_behind_a_sound_beginning_is_refused() -> None:
    for start in (b"\0\0\0\x18ftypmp42", b"\x1aE\xdf\xa3", b"RIFF\0\0\0\0AVI LIST"):
        noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
        with pytest.raises(ImageError):
            levels(start + noise)


def test_a_video_that_changes_its_size_is_refused(tmp_path: Path) -> None:
    small, large = (_elementary(tmp_path / f"{side}.mjpeg.avi", (side, side)) for side in (32, 48))
    assert levels(small, 2)
    with av.open(str(tmp_path / "both.avi"), "w") as file:
        for path in (small, large):
            with av.open(str(path)) as part:
                stream = file.streams.video[0] if file.streams.video else file.add_stream_from_template(part.streams[0])
                for packet in part.demux(part.streams[0]):
                    if packet.dts is not None:
                        packet.stream, packet.pts, packet.dts = stream, None, None
                        file.mux(packet)
    with pytest.raises(ImageError, match="changes its size from 32x32 to 48x48 at frame 5"):
        levels(tmp_path / "both.avi", 2)


def _elementary(path: Path, size: tuple[int, int], *, noise: bool = False) -> Path:
    """A video of five JPEGs."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mjpeg", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = *size, "yuvj420p"
        for number in range(5):
            image = random_image(number, size) if noise else Image.new("RGB", size, (number, 0, 0))
            frame = av.VideoFrame.from_image(image)
            file.mux(stream.encode(frame.reformat(format="yuvj420p")))
        file.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("MAX_VIDEO_BYTES", 1000, "over 0 MiB"),
        ("MAX_VIDEO_SECONDS", 2, "takes 3 seconds, the limit is 2"),
        ("MAX_VIDEO_FRAMES", 89, "over 89 frames"),
        ("MAX_FRAME_PIXELS", 64 * 47, "frames of 64x48 pixels"),
        ("MAX_VIDEO_DECODE_SECONDS", 0.0, "takes more than 0 s to read, the limit"),
        ("CODECS", ("h264",), "is coded as 'mpeg4'"),
    ],
)
@pytest.mark.parametrize("as_bytes", [False, True], ids=["path", "bytes"])
def test_limits_hold(
    clip: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: Any, message: str, as_bytes: bool
) -> None:
    monkeypatch.setattr(reading, limit, value)
    with pytest.raises(ImageError, match=message):
        levels(clip.read_bytes() if as_bytes else clip)


@pytest.mark.parametrize(("suffix", "title"), [("avi", b"INAM"), ("mp4", b"\xa9nam")])
def test_metadata_that_is_not_utf8_does_not_matter(tmp_path: Path, suffix: str, title: bytes) -> None:
    """A title of "Müller" in Latin-1, as old cameras and editors write it."""
    content = write_video(tmp_path / f"clip.{suffix}", frames=3, title="M__ller").read_bytes()
    assert title in content
    assert content.count(b"M__ller") == 1
    assert levels(content.replace(b"M__ller", "Müllers".encode("latin-1")), 3) == pytest.approx([0, 2, 4], abs=4)


def declaring(samples: int, tracks: int) -> bytes:
    """An MP4 of a kilobyte or two whose tables say that each track has `samples` samples of a byte."""
    content = BytesIO()
    with av.open(content, "w", format="mp4") as file:
        for _ in range(tracks):
            stream = file.add_stream("mpeg4", rate=RATE)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        black = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        for stream in file.streams.video:
            file.mux([*stream.encode(black), *stream.encode()])
    made = bytearray(content.getvalue())
    # sample sizes: size, count; times: count of entries, count; chunks: count of entries, first chunk, samples in it
    for box, at, numbers in ((b"stsz", 8, (1, samples)), (b"stts", 12, (samples,)), (b"stsc", 16, (samples,))):
        place = -1
        for _ in range(tracks):
            place = made.index(box, place + 1)
            struct.pack_into(f">{len(numbers)}I", made, place + at, *numbers)
    return bytes(made)


@pytest.mark.sampled(3)
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits are Linux's")
@pytest.mark.parametrize("samples", [100_000, 60_000_000, 2_000_000_000])
@pytest.mark.parametrize("tracks", [1, 2])
def test_a_table_of_millions_of_samples_takes_no_memory_of_this_process(
    tmp_path: Path, samples: int, tracks: int
) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(declaring(samples, tracks))
    assert path.stat().st_size < 2000
    code = (
        "import re, resource, sys; import numpy as np; from vtx.runtime.errors import ImageError\n"
        "from vtx.runtime.vision.frame_sampling import FrameSampling\n"
        "from vtx.runtime.vision.video import Video, load_frames\n"
        "try: load_frames(Video(sys.argv[1]), FrameSampling(8), np.asarray)\n"
        "except ImageError as error: print(error)\n"
        "ours = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(ours, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    message, taken = done.stdout.splitlines()
    assert "has over 72,000 frames, the limit" in message
    ours, childs = (int(kibibytes) << 10 for kibibytes in taken.split())
    assert ours < 512 << 20  # 2 GB without the child
    assert childs < MAX_VIDEO_MEMORY


def test_frames_fewer_than_packets_are_sampled_anew(tmp_path: Path) -> None:
    """VP8 has frames that are decoded and never shown, of which a container knows nothing."""
    path = tmp_path / "clip.mkv"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libvpx", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        pictures = [np.full((48, 64, 3), 10 * number, np.uint8) for number in range(12)]
        packets = [p for picture in pictures for p in stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24"))]
        packets += stream.encode()
        assert len(packets) == 12
        for number, packet in enumerate(packets):
            content = bytearray(bytes(packet))
            if number in (2, 5, 11):
                content[0] &= ~16  # "show frame"
            hidden = av.Packet(bytes(content))
            hidden.stream, hidden.pts, hidden.dts, hidden.time_base = stream, packet.pts, packet.dts, packet.time_base
            hidden.is_keyframe = packet.is_keyframe
            file.mux(hidden)
    shown = [10 * number for number in range(12) if number not in (2, 5, 11)]
    assert levels(path, 9) == pytest.approx(shown, abs=4)
    assert levels(path, 4) == pytest.approx([shown[at] for at in evenly(4, 0, 8)], abs=4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("crash", r"crashes the process that reads it \(SIGABRT\)"),
        ("exhaust", "needs more than 1.61 GB of memory to read, the limit"),
        ("hang", "takes more than 2 s to read, the limit"),
        ("lie", "makes its decoder return invalid frames"),
        ("miscount", "makes its decoder return invalid frames"),
        ("endless", "makes its decoder return invalid frames"),
    ],
)
def test_a_decoder_that_goes_wrong_is_one_error_and_costs_nothing_else(
    clip: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(reading, "CHILD", f"tests.support.video_faults:{fault}")
        if fault == "hang":
            patch.setattr(reading, "MAX_VIDEO_DECODE_SECONDS", 2.0)
        with pytest.raises(ImageError, match=f"clip.mp4' {message}"):
            levels(clip)
    assert levels(clip, 2) == pytest.approx([0, 178], abs=4)


def test_a_video_that_nobody_waits_for_any_more_is_left(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHILD", "tests.support.video_faults:hang")
    seen = list[object]()
    with pytest.raises(RequestError, match="is no longer wanted"):
        load_frames(Video(clip), FrameSampling(8), seen.append, stopped=lambda: len(seen) == 2)


def test_threads_read_videos_side_by_side(clip: Path) -> None:
    content = clip.read_bytes()
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(levels, [clip, content, clip, content]):
            assert found == pytest.approx([2 * place for place in evenly(8, 0, FRAMES - 1)], abs=4)


def test_reading_a_video_loads_no_decoder_here(clip: Path) -> None:
    code = (
        "import sys; import numpy as np; from vtx.runtime.vision.frame_sampling import FrameSampling; "
        "from vtx.runtime.vision.video import Video, load_frames; "
        "print(len(load_frames(Video(sys.argv[1]), FrameSampling(3), np.asarray)), 'av' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(clip)], capture_output=True, text=True, check=True)
    assert done.stdout == "3 False\n"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_converting_frames_starts_no_threads(clip: Path) -> None:
    """PyAV would start one a core for each frame: with two cores the 86th did not fit into a decoder's memory."""
    with av.open(str(clip)) as container:
        frames = list(container.decode(video=0))
        before = len(os.listdir("/proc/self/task"))
        for frame in frames:
            frame.reformat(format="rgb24", **conversion())
            frame.to_image(**conversion())
        assert len(os.listdir("/proc/self/task")) == before


def test_what_is_no_file_and_no_array_is_refused() -> None:
    given: Any = random_image(1)
    with pytest.raises(ImageError, match="the video is of type Image; give a path"):
        load_frames(Video(given), FrameSampling(2), lambda frame: frame)


def test_a_directory_and_an_absent_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is a directory"):
        levels(tmp_path)
    with pytest.raises(ImageError, match="does not exist"):
        levels(tmp_path / "absent.mp4")


def test_vtx_run_answers_about_a_file(clip: Path, models: Models, tmp_path: Path) -> None:
    bundle = str(models(VIDEO_LLAVA, (3, 5)).bundle.folder)
    picture = tmp_path / "photo.png"
    random_image(0).save(picture)
    options = ["red?", "--bundle", bundle, "--device", "cpu", "--max-new-tokens", "1", "--frames", "3", "--json"]
    done = CliRunner().invoke(cli.run, [str(clip), *options, "--video", str(clip), "--image", str(picture)])
    answer = json.loads(done.stdout)
    assert answer["vision_tokens"] == 2 * 3 * 17 + 16
    assert answer["image"] == [str(clip), str(picture), str(clip)]
    shown = CliRunner().invoke(cli.inspect, [bundle])
    assert "videos: 8 frames (--frames), 136 tokens" in shown.stdout
    refused = CliRunner().invoke(cli.run, [str(picture), *options])
    assert refused.exit_code == 1
    assert "--frames 3 has no effect" in refused.stderr


def test_without_pyav_the_extra_is_named(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LIBRARIES", ())
    with pytest.raises(DeviceError, match=r"pip install \"vtx-edge\[video\]\""):
        levels(clip)
