"""One model of libvtx and many threads. `make cpp-threads` runs this under ThreadSanitizer."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.cpp import needs_cpp, run
from tests.support.exported import Models
from tests.support.tiny import random_image

pytestmark = needs_cpp


def test_threads_that_share_a_model_get_the_answers_of_one_alone(models: Models, tmp_path: Path) -> None:
    random_image(1).save(tmp_path / "a.png")
    done = run("threads", models().bundle.folder, tmp_path / "a.png")
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found = re.fullmatch(rb"(\d+) answers, (\d+) busy, (\d+) cancelled, 0 wrong\n", done.stdout)
    assert found, done.stdout
    answers, busy, cancelled = map(int, found.groups())
    assert answers + busy + cancelled == 4 * 6 + 3 * 6 + 1 + 4
    assert answers >= 4 * 6 + 1 + 4
