"""vtx-run --model against a hub on the loopback address, and vtx-cache."""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.families.vila import VILA
from tests.support.fixtures import Checkpoints
from tests.support.gated import WAIT
from tests.support.hub import COMMIT, Hub, ask_here, serving_hub
from tests.support.tiny import Tiny, random_image
from vtx import cli
from vtx.runtime.errors import ExportError
from vtx.tools.common import cache

MODEL = "org/tiny"
NAME = "org--tiny-knone-fp32"
WEIGHTS = "model.safetensors"
QUESTION = ("what is it?", "--max-new-tokens", 1, "--json")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    random_image(0, (60, 60)).save(path)
    return path


@pytest.fixture
def bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache of bundles."""
    for name in ("VTX_BUNDLE", "VTX_CACHE_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path / "cache/vtx/bundles"


@pytest.fixture
def hub(tiny_checkpoint: Checkpoints, bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, which huggingface_hub asks in this process, with an empty cache of its own."""
    with serving_hub({MODEL: tiny_checkpoint()}) as hub:
        ask_here(hub, monkeypatch, tmp_path / "hf")
        yield hub


def invoke(command: str, *words: object) -> Result:
    return CliRunner().invoke(getattr(cli, command), [str(w) for w in words], catch_exceptions=False)


def ask(image: Path, *words: object, model: str = MODEL) -> Result:
    return invoke("run", "--model", model, "--precision", "fp32", image, *QUESTION, *words)


def answered(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def refused(result: Result) -> str:
    """The last line on stderr of a command that failed; nothing of it is a traceback."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def fake(bundles: Path, name: str, size: int, used: float) -> Path:
    folder = bundles / name
    folder.mkdir(parents=True)
    (folder / "vtx.json").write_bytes(b"x" * size)
    os.utime(folder, (used, used))
    return folder


# ---- one command to a model ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_fetched_and_exported_once_and_then_found_without_the_hub(
    hub: Hub, bundles: Path, image: Path
) -> None:
    first = ask(image)
    assert "fetching and exporting" in first.stderr
    assert answered(first)["bundle"] == str(bundles / NAME)
    assert answered(first)["k"] is None, "without a card a model runs in full"
    assert hub.served(WEIGHTS) == [None]
    hub.requests.clear()
    second = ask(image)
    assert answered(second)["token_ids"] == answered(first)["token_ids"]
    assert "export" not in second.stderr
    assert hub.requests == []


@pytest.mark.slow
def test_the_second_run_imports_no_exporter_and_reaches_for_no_network(
    hub: Hub, bundles: Path, image: Path, tmp_path: Path
) -> None:
    first = answered(ask(image))
    code = (
        "import sys; from vtx.cli import run\n"
        "try: run(sys.argv[1:])\n"
        "finally: print(*sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    words = ["--model", MODEL, "--precision", "fp32", str(image), *map(str, QUESTION)]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    code = code.replace("run(sys", "run.main(sys").replace("[1:])", "[1:], standalone_mode=False)")
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == first["token_ids"]
    assert not {"torch", "transformers", "huggingface_hub"} & set(done.stderr.split())


FAMILIES = {
    "llava_next": Tiny(family="llava_next", context=512, shards=3),
    "internvl": Tiny(
        family="internvl", vision="internvl", text="qwen2", tokenizer="bytes", names="saved", feature_layer=-1
    ),
    "idefics3": Tiny(family="idefics3", vision="siglip", tokenizer="bytes", context=1024),
    "vila": VILA,
}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_every_layout_of_files_are_fetched_and_answer(
    hub: Hub, tiny_checkpoint: Checkpoints, image: Path, family: str
) -> None:
    hub.models["org/other"] = tiny_checkpoint(FAMILIES[family])
    first = answered(ask(image, model="org/other"))
    weights = {path for _, path, _ in hub.requests if path.endswith(".safetensors")}
    assert len(weights) == len(list(hub.models["org/other"].rglob("*.safetensors")))
    hub.refused = 500, "", ""
    assert answered(ask(image, model="org/other"))["token_ids"] == first["token_ids"]


@pytest.mark.slow
def test_vtx_chat_takes_a_model_of_the_hub(hub: Hub, bundles: Path, image: Path) -> None:
    words = ["--model", MODEL, "--precision", "fp32", "--max-new-tokens", "1", str(image)]
    done = CliRunner().invoke(cli.chat, words, input="what is it?\n", catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert [entry.folder.name for entry in cache.entries()] == [NAME]


@pytest.mark.slow
def test_vtx_serve_serves_a_model_of_the_hub_by_its_id(
    hub: Hub, bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="needs vtx-edge[serve]", exc_type=ModuleNotFoundError)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    done = invoke("serve", "--model", MODEL, "--precision", "fp32", "--port", 0)
    assert done.exit_code == 0, done.stderr
    assert f"serving {MODEL} at" in done.stderr
    assert invoke("serve", "--model", MODEL, "--bundle", bundles / NAME).exit_code == 2


@pytest.mark.slow
def test_interrupted_and_killed_in_the_middle_of_the_weights_it_ends_and_is_whole_in_the_end(
    hub: Hub, bundles: Path, image: Path, tmp_path: Path
) -> None:
    # A read waits an hour for more, so that nothing but the signal ends it.
    home = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "3600"}
    environment = {**os.environ, **home, "HF_ENDPOINT": hub.address}
    command = [sys.executable, "-c", "from vtx.cli import run; run()", "--model", MODEL, "--precision", "fp32"]
    command += [str(image), *map(str, QUESTION)]
    hub.stuck = WEIGHTS
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGKILL, -9)):
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert hub.reached.wait(WAIT)
                process.send_signal(number)
                _, said = process.communicate(timeout=WAIT)
            finally:
                process.kill()
        assert process.returncode == code
        if number == signal.SIGINT:
            assert said.endswith(": interrupted\n")
            assert list((tmp_path / "home").rglob("*.incomplete")) == []
        hub.reached.clear()
        assert cache.entries() == []
    hub.stuck = None
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(hub.served(WEIGHTS)) == 4
    assert len(hub.served("config.json")) == 1, "what is whole stays"


@pytest.mark.slow
def test_options_and_revisions_are_bundles_of_their_own(hub: Hub, bundles: Path, image: Path) -> None:
    assert answered(ask(image, "--k", 3))["k"] == 3
    assert answered(ask(image, model=f"{MODEL}@tag"))["k"] is None
    assert {entry.folder.name for entry in cache.entries()} == {"org--tiny-k3-fp32", "org--tiny@tag-knone-fp32"}
    assert len(hub.served(WEIGHTS)) == 1, "both are of one commit, whose files the hub's cache has"
    gates = refused(ask(image, "--k", "auto"))
    assert "--k auto needs gates" in gates


@pytest.mark.slow
def test_a_download_interrupted_three_times_is_resumed_where_it_stopped(
    hub: Hub, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cuts = 3
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "DOWNLOAD_CHUNK_SIZE", 2**16)
    size = (hub.models[MODEL] / WEIGHTS).stat().st_size
    answered(ask(image))
    starts = [int((asked or "bytes=0-")[6:-1]) for asked in hub.served(WEIGHTS)]
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    assert starts[-1] > size * 3 // 4


@pytest.mark.slow
def test_weights_with_a_wrong_hash_are_refused_removed_and_fetched_again(
    hub: Hub, bundles: Path, image: Path, tmp_path: Path
) -> None:
    hub.wrong = (hub.models[MODEL] / WEIGHTS).read_bytes()[:-1] + b"\x55"
    message = refused(ask(image))
    assert f"{WEIGHTS} of {MODEL} was not fetched intact: its sha256 is" in message
    assert cache.entries() == []
    hub.wrong = None
    answered(ask(image))
    assert hub.served(WEIGHTS) == [None, None]


def test_weights_of_a_wrong_size_are_refused(hub: Hub, image: Path) -> None:
    hub.lost = 100
    assert "could not be fetched from the hub: OSError: Consistency check failed" in refused(ask(image))
    assert cache.entries() == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "GatedRepo", "org/tiny is gated; ask for access on its page on the hub, then run: hf auth login"),
        (403, "GatedRepo", "org/tiny is gated; ask for access on its page on the hub, then run: hf auth login"),
        (401, "", "the hub answers 401 to a request for org/tiny; ask for access on its page on the hub, then run: hf"),
        (403, "", "the hub answers 403 to a request for org/tiny; ask for access on its page on the hub, then run: hf"),
        (500, "", "the hub answers 500 to a request for org/tiny; try again later"),
        (404, "RepoNotFound", "org/tiny is neither a directory here nor a model on the hub"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_that_says_what_to_do(
    hub: Hub, image: Path, status: int, code: str, message: str
) -> None:
    hub.refused = status, code, "Access to model org/tiny is restricted."
    assert message in refused(ask(image))


def test_what_is_not_there_is_named(hub: Hub, image: Path, tmp_path: Path) -> None:
    assert "no/where is neither a directory here nor a model on the hub" in refused(ask(image, model="no/where"))
    assert f"{MODEL} has no revision v9 on the hub" in refused(ask(image, model=f"{MODEL}@v9"))
    assert "not a hub id" in refused(ask(image, model="a/b/c"))
    here = ask(image, model=str(tmp_path))
    assert here.exit_code == 2
    assert "vtx-export --model" in here.stderr


@pytest.mark.parametrize("words", [["--bundle", "x"], ["--precision", "fp16"]])
def test_model_and_bundle_do_not_mix(bundles: Path, image: Path, words: list[str]) -> None:
    model = ["--model", MODEL] if "--bundle" in words else []
    assert invoke("run", *model, *words, image, *QUESTION).exit_code == 2


def test_a_full_disk_is_one_line(hub: Hub, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_download, "http_get", full)
    assert f"the disk has no space for {MODEL} in {tmp_path / 'hf'}; free some there, or set HF_HOME" in refused(
        ask(image)
    )


@pytest.mark.slow
def test_a_disk_that_fills_during_the_export_leaves_nothing(
    hub: Hub, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr("vtx.exporter.bundling.build.fill", full)
        assert "No space left on device" in refused(ask(image))
    assert cache.entries() == []
    answered(ask(image))


@pytest.mark.slow
def test_two_processes_at_once_make_one_bundle(hub: Hub, bundles: Path, image: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", "from vtx.cli import run; run()", "--model", MODEL, "--precision", "fp32"]
    command += [str(image), *map(str, QUESTION)]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first["token_ids"] == second["token_ids"]
    assert sum("weights " in err for _, err in said) == 1, "one exports, the other waits"
    assert [entry.folder.name for entry in cache.entries()] == [NAME]
    assert hub.served(WEIGHTS) == [None]


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaves_and_never_one_in_use(bundles: Path) -> None:
    old, _, young = (fake(bundles, name, 1000, used) for used, name in enumerate(("old", "middle", "young"), 1))
    held = cache.hold(old)
    assert held is not None
    os.utime(old, (1, 1))
    assert list(cache.trim(2500)) == ["middle"]
    assert old.is_dir()
    assert young.is_dir()
    with pytest.raises(ExportError, match=r"its limit is 500 B, and 1 kB are in use; raise VTX_CACHE_LIMIT"):
        list(cache.trim(500))
    os.close(held)
    assert list(cache.trim(0)) == ["old"]
    assert cache.entries() == []


def test_a_use_counts_and_a_missing_bundle_is_not_held(bundles: Path) -> None:
    old, young = fake(bundles, "old", 1, 1), fake(bundles, "young", 1, 2)
    for _ in range(2):  # several may use one
        assert cache.hold(old) is not None
    assert [entry.folder for entry in cache.entries()] == [young, old]
    assert cache.hold(bundles / "none") is None


def test_what_is_too_large_for_the_cache_is_refused_and_removes_nothing(bundles: Path) -> None:
    fake(bundles, "old", 1000, 1)
    with pytest.raises(ExportError, match=r"^5 kB for this bundle are too much for the cache: its limit is 4 kB; "):
        list(cache.trim(4000, 5000, bundles / "new"))
    assert [entry.folder.name for entry in cache.entries()] == ["old"]


def test_room_is_made_but_not_from_the_interrupted_export_itself(bundles: Path) -> None:
    fake(bundles, ".new.partial-0", 1000, 1)
    fake(bundles, ".other.partial-0", 1000, 2)
    assert list(cache.trim(1500, 1500, bundles / "new")) == [".other.partial-0"]
    assert (bundles / ".new.partial-0").is_dir()


@pytest.mark.slow
def test_a_bundle_of_the_cache_makes_room_for_the_next_one(
    hub: Hub, bundles: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(ask(image))
    (made,) = cache.entries()
    monkeypatch.setenv("VTX_CACHE_LIMIT", f"{made.bytes * 1.5 / 1e6}MB")
    result = ask(image, "--k", 3)
    assert answered(result)["k"] == 3
    assert f"removed {NAME} from the cache" in result.stderr
    assert [entry.folder.name for entry in cache.entries()] == ["org--tiny-k3-fp32"]
    monkeypatch.setenv("VTX_CACHE_LIMIT", "much")
    assert "VTX_CACHE_LIMIT is 'much', not a size" in refused(ask(image, "--k", 5))


def test_the_cache_is_listed_and_emptied(bundles: Path) -> None:
    assert "0 B of 40 GB" in invoke("cache").stdout
    for number, name in enumerate(("first", "second", "third")):
        fake(bundles, name, 10**6, number)
    listed = invoke("cache").stdout
    assert [line.split()[:3] for line in listed.splitlines() if "MB  " in line] == [
        [name, "1", "MB"] for name in ("third", "second", "first")
    ]
    assert "3 MB of 40 GB in" in listed
    assert invoke("cache", "remove", "second").exit_code == 0
    assert "'second' is not in" in refused(invoke("cache", "remove", "second"))
    assert "removed first" in invoke("cache", "--limit", "1MB").stderr
    held = cache.hold(bundles / "third")
    assert held is not None
    assert "third: in use" in refused(invoke("cache", "clear"))
    os.close(held)
    assert invoke("cache", "clear").exit_code == 0
    assert cache.entries() == []


@pytest.mark.parametrize("words", [["remove"], ["clear", "x"], ["list", "x"], ["--limit", "much"], ["other"]])
def test_wrong_words_for_the_cache_are_wrong_usage(bundles: Path, words: list[str]) -> None:
    assert invoke("cache", *words).exit_code == 2


def test_a_file_system_without_locks_removes_nothing_and_still_answers(
    bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(bundles, "one", 1, 1)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert cache.hold(bundles / "one") is not None
    assert not cache.remove(bundles / "one")


@pytest.mark.slow
def test_the_commit_is_in_the_bundle(hub: Hub, bundles: Path, image: Path) -> None:
    answered(ask(image))
    assert COMMIT in (bundles / NAME / "vtx.json").read_text(encoding="utf-8")
