"""The examples, and a project of somebody else that finds an installed libvtx by CMake and by pkg-config."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.cpp import BUILD, needs_cpp, onnxruntime, output
from tests.support.exported import Models
from tests.support.tiny import random_image
from tests.support.v4l2_camera import needs_video4linux, v4l2_camera
from vtx.runtime.api.model import Model

pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not (BUILD / "examples").exists(), reason="this build of libvtx has no examples: make cpp"),
]

ROOT = Path(__file__).parents[3]
STANDIN = ROOT / "tests/support/standin/ros2"
QUESTIONS = "red?", "How many circle shapes are there?"
ENVIRONMENT = {**os.environ, "VTX_ONNXRUNTIME": onnxruntime()}


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models()


def done(*command: str | Path, **variables: str) -> str:
    """What a command that must succeed prints."""
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**ENVIRONMENT, **variables})
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def ask_answers(program: Path, model: Model, picture: Path, **variables: str) -> None:
    """The example `ask` must print what Python answers."""
    random_image(2).save(picture)
    lines = done(program, model.bundle.folder, picture, *QUESTIONS, **variables)
    with model.open(picture) as conversation:
        answers = [conversation.ask(question) for question in QUESTIONS]
    assert lines == "".join(f"{answer.text}  ({len(answer.token_ids)} tokens)\n" for answer in answers)


def test_the_example_ask_prints_the_answers_of_python(model: Model, tmp_path: Path) -> None:
    ask_answers(BUILD / "examples/vtx-example-ask", model, tmp_path / "a.png")


def test_the_example_camera_answers_about_frames_and_goes_on_after_a_damaged_one(model: Model, tmp_path: Path) -> None:
    for number in (1, 3):
        random_image(number).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"no picture")
    run = camera(model, tmp_path)
    assert run.returncode == 0, run.stderr
    with model.open(tmp_path / "3.png") as conversation:  # the last frame is always answered
        text = conversation.ask("red?", max_new_tokens=32).text
    assert run.stdout.endswith(f"{tmp_path}/3.png: {text}\n")
    assert "frames were replaced by newer ones" in run.stderr


def test_the_example_camera_runs_no_frame_that_is_equal_to_the_last_one(model: Model, tmp_path: Path) -> None:
    for number in range(20):
        random_image(1).save(tmp_path / f"{number:02}.png")
    run = camera(model, tmp_path)
    assert run.returncode == 0, run.stderr
    with model.open(tmp_path / "00.png") as conversation:
        text = conversation.ask("red?", max_new_tokens=32).text
    first, *others = [line.partition(".png: ")[2] for line in run.stdout.splitlines()]
    assert first == text
    assert set(others) == {f"{text} (as before)"}


def camera(model: Model, device: Path, *options: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [BUILD / "examples/vtx-example-camera", model.bundle.folder, device, *(options or ["red?"])]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env={**ENVIRONMENT, **variables})


def test_the_example_camera_keeps_what_stands_before_each_frame_in_a_prefix_file(model: Model, tmp_path: Path) -> None:
    frames, prefix = tmp_path / "frames", tmp_path / "prefix"
    frames.mkdir()
    random_image(1).save(frames / "1.png")
    options = ("--system", "Be brief, please.", "--prefix", prefix, "--every", "0", "red?", "How many?")
    first, written = camera(model, frames, *options), prefix.read_bytes()
    assert first.stderr == "0 of 1 frames were replaced by newer ones\n"
    with model.open(frames / "1.png", system="Be brief, please.") as conversation:
        for line, question in zip(first.stdout.splitlines(), ("red?", "How many?"), strict=True):
            text = conversation.ask(question, max_new_tokens=32).text
            assert line == f"{frames}/1.png: {question} {text}"
    again = camera(model, frames, *options)
    assert (again.stdout, again.stderr, prefix.read_bytes()) == (first.stdout, first.stderr, written)
    assert camera(model, frames, "--system", "Be long.", *options[2:]).stderr == first.stderr
    assert prefix.read_bytes() != written, "another system text makes another file"
    prefix.write_bytes(b"damaged")
    told = camera(model, frames, *options)
    assert (told.stdout, prefix.read_bytes()) == (first.stdout, written)
    assert told.stderr.startswith(f"{prefix}: prefix holds 7 bytes")


def test_the_example_camera_names_a_wrong_option(model: Model, tmp_path: Path) -> None:
    for options, said in ((("--far", "1"), "there is no option --far"), (("--near",), "--near has no value")):
        run = camera(model, tmp_path, *options)
        assert (run.returncode, run.stdout) == (1, "")
        assert said in run.stderr
    assert camera(model, tmp_path, "--every", "5").returncode == 2


@needs_video4linux
def test_what_is_no_camera_is_named(model: Model, tmp_path: Path) -> None:
    for device, message in (
        (tmp_path / "video9", "video9 cannot be opened (No such file or directory); ls /dev/video* shows the cameras"),
        (Path("/dev/null"), "/dev/null is not a camera (Inappropriate ioctl for device)"),
    ):
        run = camera(model, device)
        assert (run.returncode, run.stdout) == (1, "")
        assert message in run.stderr


def save_raw(path: Path, format: str, side: int, stride: int, frame: bytes) -> None:
    """Save a camera's buffer as a picture."""
    rgb = output("probe", "buffer", format, str(side), str(side), str(stride), stdin=frame)
    Image.frombytes("RGB", (side, side), rgb).save(path)


@needs_video4linux
@pytest.mark.parametrize("kind", ["YUYV", "NV12", "MJPG", "H264"])
def test_the_whole_frames_of_a_camera_are_answered_until_it_is_gone(model: Model, tmp_path: Path, kind: str) -> None:
    side, stride, shown = 60, 128, tmp_path / "seen.png"
    if kind == "MJPG":
        shown = tmp_path / "seen.jpg"
        random_image(5).save(shown)
        frame = shown.read_bytes()
    else:
        rows = side if kind == "YUYV" else side * 3 // 2
        frame = np.random.default_rng(5).integers(0, 256, (rows, stride), np.uint8).tobytes()
        format = kind.lower() if kind != "H264" else "nv12"
        save_raw(shown, format, side, stride, frame)
    device, variables = v4l2_camera(tmp_path, kind, frame, side, stride)
    run = camera(model, device, **variables)
    assert run.returncode == 1
    if kind == "H264":
        assert "gives frames neither in YUYV nor in NV12 nor in MJPEG" in run.stderr
        return
    with model.open(shown) as conversation:
        text = conversation.ask("red?", max_new_tokens=32).text
    assert run.stdout == f"{device}: {text}\n"
    assert "video0 gives no frames (No such device); was it pulled out?" in run.stderr


@needs_video4linux
@pytest.mark.parametrize("kind", ["YUYV", "NV12"])
def test_a_camera_that_changes_its_size_while_it_streams_is_opened_again(
    model: Model, tmp_path: Path, kind: str
) -> None:
    side, later, stride, shown = 60, 30, 128, [tmp_path / "before.png", tmp_path / "after.png"]
    rows = side if kind == "YUYV" else side * 3 // 2
    frame = np.random.default_rng(5).integers(0, 256, (rows, stride), np.uint8).tobytes()
    save_raw(shown[0], kind.lower(), side, stride, frame)
    save_raw(shown[1], kind.lower(), later, stride // 2, frame[: len(frame) // 4])
    device, variables = v4l2_camera(tmp_path, kind, frame, side, stride, later_side=later)
    run = camera(model, device, **variables)
    answers = list[str]()
    for path in shown:
        with model.open(path) as conversation:
            answers.append(f"{device}: {conversation.ask('red?', max_new_tokens=32).text}")
    lines = run.stdout.splitlines()
    assert lines[-1] == answers[1]
    assert lines[:-1] in ([], answers[:1]), "the first frame may be replaced by the last"
    changed = f"from 60x60 {kind} of 128 bytes a row to 30x30 {kind} of 64 bytes a row; it is opened again"
    assert changed in run.stderr
    assert run.returncode == 1


@pytest.mark.slow
def test_a_project_finds_an_installed_libvtx(model: Model, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    done("cmake", "--install", BUILD, "--prefix", prefix)
    done("cmake", "-S", ROOT / "examples/cpp", "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}")
    done("cmake", "--build", tmp_path / "b", "--target", "vtx-example-ask")
    ask_answers(tmp_path / "b/vtx-example-ask", model, tmp_path / "a.png")
    assert "--bundle" in done(prefix / "bin/vtx-cpp-run", "--help"), "it finds the library beside it"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
def test_pkg_config_names_what_a_compiler_needs(model: Model, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    done("cmake", "--install", BUILD, "--prefix", prefix)
    [libraries] = {path.parent for path in prefix.rglob("libvtx.so")}
    variables = {"PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
    flags = done("pkg-config", "--cflags", "--libs", "vtx", **variables).split()
    program = tmp_path / "ask"
    done(os.environ.get("CXX", "c++"), "-std=c++17", ROOT / "examples/cpp/ask.cpp", "-o", program, *flags)
    ask_answers(program, model, tmp_path / "a.png", LD_LIBRARY_PATH=str(libraries))


def test_the_example_camera_tells_a_supervisor_that_it_is_ready_and_lives(model: Model, tmp_path: Path) -> None:
    frames, place = tmp_path / "frames", tmp_path / "notify"
    frames.mkdir()
    random_image(1).save(frames / "1.png")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(place))
        supervisor.settimeout(60)
        assert camera(model, frames, NOTIFY_SOCKET=str(place)).returncode == 0
        assert [supervisor.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]


def test_the_node_of_ros_publishes_the_answers_of_python(model: Model, tmp_path: Path) -> None:
    """Compiled and run with stand-ins for rclcpp and its messages."""
    node = tmp_path / "node"
    folders = (STANDIN, ROOT / "runtime/cpp/include", ROOT / "examples/cpp")
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", *(f"-I{folder}" for folder in folders))
    libraries = (f"-L{BUILD}", "-lvtx", "-pthread", f"-Wl,-rpath,{BUILD}")
    done("c++", *flags, ROOT / "examples/cpp/ros2/node.cpp", "-o", node, *libraries)
    pictures, answers = [], []
    for number, encoding in ((1, "rgb8"), (2, "unknown"), (3, "bgr8")):
        image = random_image(number)
        (tmp_path / encoding).write_bytes(np.asarray(image)[..., :: -1 if encoding == "bgr8" else 1].tobytes())
        pictures += [encoding, str(image.width), str(image.height), str(tmp_path / encoding)]
        if encoding != "unknown":
            with model.open(image) as conversation:
                answers.append(conversation.ask("red?").text)
    variables = {"ROS_bundle": str(model.bundle.folder), "ROS_question": "red?", "ROS_PICTURES": " ".join(pictures)}
    run = subprocess.run([node], capture_output=True, text=True, env={**ENVIRONMENT, **variables}, timeout=300)
    assert (run.returncode, run.stdout.splitlines()) == (0, answers)
    assert run.stderr == "the encoding unknown is not known; publish rgb8 or bgr8\n"
