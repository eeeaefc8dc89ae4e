"""Processor time of every test file: written by a run of all tests, which fails where one file takes too much of it.

Shares and processor time, not seconds on the clock: both stay what they are on a busy machine and on a slow one.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server

SHARE = 0.05  # of a run of all tests that are not slow
SHARE_OF_ALL = 0.1  # of a run of all, in which few files have the slow ones
WRITTEN = Path(__file__).parents[2] / "build/test-times.json"


def processor_seconds() -> float:
    """Of this process, of the children that it has waited for, and of those forked for it."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + fork_server.forked_seconds


def too_large(seconds: Mapping[str, float], share: float = SHARE) -> list[str]:
    """A line for each file above `share`, the largest first."""
    total = sum(seconds.values())
    return [
        f"{file} takes {spent:.0f} s of processor time, {spent / total:.1%} of the run; a file may take {share:.0%}: "
        "share what its tests make, choose cases by `covering`, or mark `slow` what others show, too"
        for file, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if spent > share * total
    ]


class Budget:
    """A plugin of pytest, in the process that runs tests and in the one that starts such processes."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds = defaultdict[str, float](float)
        self._ran_all = (
            config.args_source is pytest.Config.ArgsSource.TESTPATHS
            and not config.option.keyword
            and config.option.markexpr in ("", "not slow")
            and not config.option.collectonly
        )
        self._lines: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = processor_seconds()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid.partition("::")[0]] += processor_seconds() - before

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Of xdist: a process that ran tests has ended."""
        for file, spent in getattr(node, "workeroutput", {}).get("seconds", {}).items():
            self._seconds[file] += spent

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["seconds"] = dict(self._seconds)
            return
        if not self._ran_all or not self._seconds:
            return
        WRITTEN.parent.mkdir(exist_ok=True)
        rounded = {file: round(spent, 2) for file, spent in sorted(self._seconds.items(), key=lambda item: -item[1])}
        WRITTEN.write_text(json.dumps(rounded, indent=0), encoding="utf-8")
        share = SHARE if session.config.option.markexpr else SHARE_OF_ALL
        self._lines = too_large(self._seconds, share)
        if self._lines and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._ran_all and self._seconds:
            total = sum(self._seconds.values())
            terminalreporter.write_line(f"{total:.0f} s of processor time in {len(self._seconds)} files: {WRITTEN}")
        for line in self._lines:
            terminalreporter.write_line(f"ERROR {line}", red=True)
