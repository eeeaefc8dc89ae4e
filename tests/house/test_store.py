"""What tests make and share lasts from run to run, unless the code changes, and nobody writes into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import store
from tests.support.store import new_folder, open_store, publish, verified


def end_use() -> None:
    """As the end of a process does."""
    while store.LOCKS:
        os.close(store.LOCKS.pop())


@pytest.fixture(autouse=True)
def ownLOCKS(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "LOCKS", [])
    yield
    end_use()


def published(folder: Path, text: str) -> Path:
    made = new_folder(folder)
    (made / "file").write_text(text, encoding="utf-8")
    publish(made, folder / "model")
    return folder / "model"


def test_what_was_published_first_is_there_for_later_runs(tmp_path: Path) -> None:
    published(open_store(tmp_path, "code"), "first")
    published(open_store(tmp_path, "code"), "second")
    assert (verified(open_store(tmp_path, "code") / "model") / "file").read_text(encoding="utf-8") == "first"
    assert list((tmp_path / "code/unfinished").iterdir()) == []


def test_the_folder_of_other_code_goes_unless_a_process_uses_it(tmp_path: Path) -> None:
    old = published(open_store(tmp_path, "old"), "")
    open_store(tmp_path, "new")
    assert old.exists()
    end_use()
    open_store(tmp_path, "new")
    assert not old.exists()


def test_what_an_ended_process_left_unfinished_goes(tmp_path: Path) -> None:
    abandoned = new_folder(open_store(tmp_path, "code"))
    open_store(tmp_path, "code")
    assert abandoned.exists(), "another process may be filling it"
    end_use()
    open_store(tmp_path, "code")
    assert not abandoned.exists()


def test_a_file_that_a_test_wrote_is_named(tmp_path: Path) -> None:
    folder = published(open_store(tmp_path, "code"), "")
    (folder / "file").write_text("changed", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"a test has changed \['file'\]"):
        verified(folder)


def test_a_source_that_changes_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setattr(store, "ROOT", tmp_path)
    digests = set[str]()
    for source in ("a = 1", "a = 2"):
        (tmp_path / "runtime/module.py").write_text(source, encoding="utf-8")
        digests.add(store.digest_of_code.__wrapped__())
    assert len(digests) == 2
