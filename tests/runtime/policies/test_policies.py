"""Policies one after the other, and one that a package or CONTRIBUTING adds."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.boundaries import ROOT, boundary
from tests.support.exported import THREADS
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image
from vtx import cli
from vtx.runtime.api.load import load
from vtx.runtime.api.options import Options
from vtx.runtime.policies import Boundary, base, parse
from vtx.runtime.policies import spec as specs
from vtx.runtime.policies.base import Policy
from vtx.runtime.policies.methods.fastv import FastV
from vtx.runtime.policies.methods.gate import Gate
from vtx.runtime.policies.methods.mustdrop import MustDrop
from vtx.runtime.policies.methods.withdraw import Full, Withdraw

# ---- together --------------------------------------------------------------------------------------------------------


def test_nobody_is_asked_once_the_image_has_left() -> None:
    """The boundary's scores would raise."""
    policy = Policy((Withdraw(3), FastV(2)))
    departure = policy.ask(Boundary(3, np.zeros((1, 4)), (), np.ones(6, bool)))
    assert departure is not None
    assert departure.by == ("withdrawal",)
    assert not departure.kept.any()


def test_only_those_whose_cut_it_is_are_asked() -> None:
    policy = Policy((Full(), FastV(2), MustDrop(tau=None, key=0, layers=(4,))))
    assert policy.ask(Boundary(7, np.zeros((1, 4)), (), np.ones(6, bool))) is None
    departure = policy.ask(boundary([1, 2, 3, 4], layer=3))
    assert departure is not None
    assert departure.by == ("fastv",)


def test_policies_of_equal_options_are_equal_whatever_their_gates_have_said() -> None:
    first, second = (Policy((Gate(lambda *_: np.zeros(2), (3,)), *parse("mustdrop"))) for _ in range(2))
    first.ask(Boundary(3, np.zeros((1, 4)), (), np.ones(1, bool)))
    assert first == second
    assert first != Policy((Full(), *parse("mustdrop")))


# ---- adding one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def every(tmp_path: Path) -> Iterator[str]:
    """The policy that CONTRIBUTING.md shows, registered for one test."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## How to add a policy") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    specs.kinds()  # the package's own come first
    (tmp_path / "every.py").write_text(code[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("every", tmp_path / "every.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["every"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield "every"
    del base.registered["every"], sys.modules["every"]


@pytest.mark.slow
def test_the_policy_that_contributing_shows_runs_from_export_to_answer(
    every: str, tmp_path: Path, tiny_checkpoint: Checkpoints
) -> None:
    out = tmp_path / "bundle"
    line = ["--model", str(tiny_checkpoint()), "--k", "5", "--precision", "fp32", "--reduce", "every:n=2"]
    done = CliRunner().invoke(cli.export, [*line, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    options = Options(max_new_tokens=4, ignore_eos=True)
    with load(out, threads=THREADS).open(random_image(1)) as image:
        answer, plain = image.ask("red?", None, options), image.ask("red?", None, options, reduce="none")
        thirds = image.ask("red?", 5, options, reduce="every:n=3")
    assert answer.stats.reduce == "every:n=2,k=2"
    assert answer.stats.vision_tokens_kept == (16, 16, *[8] * 6)
    assert answer.stats.reduced is not None
    assert answer.stats.reduced.kept[-1].patches == (tuple(range(0, 16, 2)),)
    assert thirds.stats.vision_tokens_kept == (16, 16, 6, 6, 0, 0, 0, 0)
    assert plain.stats.vision_tokens_kept == (16,) * 8
    assert plain.stats.reduced is None
