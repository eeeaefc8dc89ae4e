"""The bundles of a directory come, change and go while a server runs; none is served half."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.serving import WAIT, Served, asking, serving, until, user
from tests.support.tiny import Tiny, random_image
from vtx.cli import serve
from vtx.runtime.server.engines import Engines
from vtx.runtime.server.folder import BundleFolder

QUESTION = asking(user("red?", random_image(1)), k="none")


@pytest.fixture(scope="module")
def later(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with another K."""
    return export(tiny_checkpoint(Tiny()), tmp_path_factory.mktemp("later") / "later", (4,), "fp32").folder


class Followed:
    """A directory of bundles, the server that follows it, and what was told of it."""

    def __init__(self, served: Served, path: Path) -> None:
        self.path = path
        self.served = served
        self.told = list[str]()
        self.folder = BundleFolder(served.engines, path, self.told.append)

    def look(self) -> list[str]:
        """What two looks tell: at the second one, what does not change any more is read."""
        before = len(self.told)
        self.folder.look()
        self.folder.look()
        return self.told[before:]

    @property
    def names(self) -> list[str]:
        return [model["id"] for model in self.served.request("GET", "/v1/models").json["data"]]


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    (tmp_path / "bundles").mkdir()
    with serving({}) as served:
        yield Followed(served, tmp_path / "bundles")


def put(bundle: Path, target: Path) -> None:
    """A bundle in one step."""
    shutil.copytree(bundle, target.with_name(f".{target.name}"))
    target.with_name(f".{target.name}").rename(target)


def test_a_server_begins_without_bundles_and_serves_those_that_come(followed: Followed, tiny_bundle: Path) -> None:
    assert followed.served.chat(QUESTION).json["error"]["message"].endswith("this server has none")
    put(tiny_bundle, followed.path / "tiny")
    assert followed.look() == ["tiny is served"]
    assert followed.names == ["tiny"]
    assert followed.served.chat(QUESTION).status == 200
    assert followed.look() == []


@pytest.mark.slow
def test_a_changed_bundle_takes_the_place_of_the_old_one_whose_answers_end(
    followed: Followed, tiny_bundle: Path, later: Path
) -> None:
    put(tiny_bundle, followed.path / "tiny")
    followed.look()
    body = asking(user("red?", random_image(1)), k=3, max_tokens=200)
    wanted = followed.served.chat(body).json["usage"]["vtx"]["token_ids"]
    (old,) = followed.served.engines.loaded
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(followed.served.chat, body)
        until(lambda: old.scheduler.active == 1, "it begins")
        (followed.path / "tiny").rename(followed.path / ".old")
        put(later, followed.path / "tiny")
        assert followed.look() == ["tiny was replaced"]
        assert followed.served.chat(asking(user("red?"), k=4)).status == 200
        assert answer.result(WAIT).json["usage"]["vtx"]["token_ids"] == wanted
    until(lambda: not old.users, "its client has its answer a moment before")
    followed.look()
    assert old.model.loaded.conversations.closed


@pytest.mark.slow
def test_a_bundle_that_is_gone_is_served_no_more_but_its_answer_ends(followed: Followed, tiny_bundle: Path) -> None:
    put(tiny_bundle, followed.path / "tiny")
    put(tiny_bundle, followed.path / "other")
    assert followed.look() == ["other is served", "tiny is served"]
    body = asking(user("red?", random_image(1)), max_tokens=200)
    assert followed.served.chat(body).status == 200
    (old,) = followed.served.engines.loaded
    until(lambda: not old.scheduler.active, "its client has its answer a moment before")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(followed.served.chat, body)
        until(lambda: old.scheduler.active == 1, "it begins")
        shutil.rmtree(followed.path / "tiny")
        assert followed.look() == ["tiny is served no more"]
        assert followed.served.chat(QUESTION).status == 404
        assert answer.result(WAIT).status == 200
    until(lambda: not old.users, "its client has its answer a moment before")
    followed.look()
    assert old.model.loaded.conversations.closed
    assert followed.names == ["other"]


@pytest.mark.slow
def test_a_bundle_that_is_written_in_part_is_not_served(followed: Followed, tiny_bundle: Path) -> None:
    """Files come one after the other, the manifest first; one has its whole size before its content."""
    target = followed.path / "tiny"
    target.mkdir()
    files = sorted(
        (file for file in tiny_bundle.rglob("*") if file.is_file()), key=lambda file: file.name != "vtx.json"
    )
    for file in files:
        (target / file.relative_to(tiny_bundle)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target / file.relative_to(tiny_bundle))
        if file is not files[-1]:
            told = followed.look()
            assert followed.names == []
            assert all(line.startswith("tiny is not served: ") for line in told)
    last = target / files[-1].relative_to(tiny_bundle)
    content = last.read_bytes()
    last.write_bytes(bytes(len(content)))
    assert followed.look()[0].startswith("tiny is not served: ")
    last.write_bytes(content)
    followed.folder.look()
    assert followed.names == [], "it may still be written"
    assert followed.look() == ["tiny is served"]


def test_a_large_file_of_the_right_size_and_other_content_is_found(
    followed: Followed, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtx.runtime.bundle.bundle.QUICK_BYTES", 0)  # all files are large
    put(tiny_bundle, followed.path / "tiny")
    weights = max((followed.path / "tiny").rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (told,) = followed.look()
    assert told.startswith("tiny is not served: ")
    assert followed.names == []


def test_a_bad_change_leaves_the_old_bundle_and_is_told_once(followed: Followed, tiny_bundle: Path) -> None:
    put(tiny_bundle, followed.path / "tiny")
    followed.look()
    (followed.path / "tiny" / "vtx.json").write_text("{}")
    (told,) = followed.look()
    assert told.startswith("tiny was not replaced: ")
    assert followed.look() == []
    assert followed.names == ["tiny"]


def test_bundles_that_have_names_by_themselves_are_left_alone(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bundles").mkdir()
    put(tiny_bundle, tmp_path / "bundles" / "tiny")
    (tmp_path / "bundles" / "no-bundle").mkdir()
    (tmp_path / "bundles" / "file").write_text("")
    with serving({"tiny": tiny_bundle}) as served:
        followed = Followed(served, tmp_path / "bundles")
        assert followed.told == []
        shutil.rmtree(tmp_path / "bundles" / "tiny")
        assert followed.look() == []
        shutil.rmtree(tmp_path / "bundles")
        assert all("cannot be read" in line for line in followed.look())
        assert followed.names == ["tiny"]


def test_a_bundle_that_goes_between_its_name_and_its_loading_is_unknown(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}) as served:
        engines = served.engines
        name = engines.named("tiny")
        engines.remove("tiny")
        with pytest.raises(Exception, match="there is no model 'tiny'; this server has none"):
            engines.acquire(name)


def test_the_command_refuses_what_is_no_directory_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(serve, ["--bundles", str(tmp_path / "nothing"), "--port", "0", "--device", "cpu"])
    assert done.exit_code == 1
    assert "nothing cannot be read" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_thread_looks_by_itself(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtx.runtime.server.folder.LOOK_SECONDS", 0.01)
    from vtx.runtime.api.load import load
    from vtx.runtime.server.limits import Limits

    def opened(folder: Path) -> Any:
        return load(folder, device="cpu", threads=1)

    engines = Engines({}, opened, Limits())
    with BundleFolder(engines, tmp_path, lambda _: None).followed():
        put(tiny_bundle, tmp_path / "tiny")
        until(lambda: engines.names == ["tiny"], "it is found")
    engines.close()
