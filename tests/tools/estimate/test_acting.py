"""vtx-plan of models that act: the expert's work, answers a second by K, and what is said of engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.support.families.pi0 import TinyPi0, make_pi0

from vtx import cli
from vtx.exporter.checkpoint.spec import config_size, find_size
from vtx.runtime.host.profiles import load_profile
from vtx.tools.estimate.plan import Workload, make_plan
from vtx.tools.estimate.sizes import KNOWN, ActionSize


def test_pi0_has_the_sizes_of_its_published_configuration() -> None:
    from transformers import PI0Config, PI0ForConditionalGeneration

    settings = PI0Config()
    written = settings.to_dict() | {"architectures": ["PI0ForConditionalGeneration"]}
    found, known = config_size(written, "x"), KNOWN["pi0"]
    assert (found.decoder, found.vision, found.action) == (known.decoder, known.vision, known.action)
    with torch.device("meta"):
        model = PI0ForConditionalGeneration(settings)
    tables = model.model.dit.embed_tokens.weight.numel()  # that an expert does not read
    counted = sum(weight.numel() for weight in model.parameters()) - tables
    assert known.parameters == pytest.approx(counted, rel=0.005)


def test_a_checkpoint_is_planned_with_its_expert(tmp_path: Path) -> None:
    tiny = TinyPi0()
    found = find_size(str(make_pi0(tmp_path, tiny)))
    assert found.action == ActionSize(tiny.hidden, tiny.ffn, tiny.heads, tiny.horizon + 1, tiny.steps, 3)
    assert found.picture(640, 480) == (3 * tiny.vlm.vision_tokens, 3)


def test_the_expert_reads_its_weights_and_the_prompt_in_each_step() -> None:
    profile, pi0, text, image = load_profile("agx-orin-64"), KNOWN["pi0"], 16, 768
    plan = make_plan(pi0, Workload(text, image, 0, 3), [None, 10], ["bf16"], profile)
    layer = 1024 * 256 * (2 * 8 + 2) + 3 * 1024 * 4096
    kv = [18 * (text + image) * 2 * 256 * 2, (9 * (text + image) + 9 * text) * 2 * 256 * 2]
    for depth, cache in zip(plan.depths, kv, strict=True):
        phases = depth.precisions["bf16"].phases
        assert phases is not None
        assert [*phases] == ["vision", "prefill", "expert"]
        seconds = 10 * (18 * layer * 2 + 18 * 2 * 2 * 1024 + cache) / (204.8e9 * 0.7)
        assert phases["expert"].ms == pytest.approx(1000 * seconds, rel=0.001)
        assert phases["expert"].bound == "memory"
    fewer = replace(pi0, action=pi0.action and replace(pi0.action, steps=5))
    half = make_plan(fewer, Workload(text, image, 0, 3), [None], ["bf16"], profile).depths[0].precisions["bf16"].phases
    whole = plan.depths[0].precisions["bf16"].phases
    assert half is not None
    assert whole is not None
    assert 2 * half["expert"].ms == pytest.approx(whole["expert"].ms)


@pytest.mark.parametrize("device", ["agx-orin-64", "agx-thor"])
def test_hertz_by_k_are_in_the_json_and_rise_as_k_falls(device: str) -> None:
    words = ["--model", "pi0", "--profile", device, "--k", "none,14,10", "--precision", "int8", "--json"]
    done = CliRunner().invoke(cli.plan, words)
    assert done.exit_code == 0, done.stderr
    costs = [depth["precisions"]["int8"] for depth in json.loads(done.stdout)["depths"]]
    hertz = [cost["hertz"] for cost in costs]
    assert hertz == [pytest.approx(1000 / sum(cost["latency_ms"].values())) for cost in costs]
    assert hertz == sorted(set(hertz))


def test_the_table_says_that_no_engine_was_looked_up() -> None:
    done = CliRunner().invoke(cli.plan, ["--model", "pi0", "--profile", "agx-orin-64", "--precision", "int8"])
    assert "an answer: 3 cameras, all pictures new, and 10 steps of the expert" in done.stdout
    assert "which engine answers is not looked up" in " ".join(done.stdout.split())
    assert "an estimate, not a measurement" in " ".join(done.stdout.split())
    refused = CliRunner().invoke(cli.plan, ["--model", "pi0", "--profile", "agx-orin-64", "--device", "tensorrt"])
    assert refused.exit_code == 2
    assert "this one acts" in refused.stderr
