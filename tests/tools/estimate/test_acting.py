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
from vtx.runtime.errors import RequestError
from vtx.runtime.host.profiles import load_profile
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan
from vtx.tools.estimate.sizes import KNOWN, ActionSize
from vtx.tools.estimate.weights import precisions_by_name


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


@pytest.mark.parametrize("policy", ["pi0", "pi05"])
def test_a_policy_of_lerobot_has_the_sizes_of_the_known_one(policy: str) -> None:
    variants = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
    found, known = config_size({"type": policy, "input_features": {}, **variants}, "x"), KNOWN[policy]
    assert (found.decoder, found.vision, found.action) == (known.decoder, known.vision, known.action)


def test_adaptive_norms_and_projected_keys_count() -> None:
    """By the shapes in LeRobot's code: matrices of three times the width a norm, and keys of the decoder's width."""
    pi0, pi05, smolvla = (KNOWN[name] for name in ("pi0", "pi05", "smolvla"))
    norms = 2 * 18 + 1
    assert pi05.parameters - pi0.parameters == norms * (3 * 1024 * 1024 + 3 * 1024) - norms * 1024
    layers = 3 * 720 * 2048 + 2 * 720 * 960 + 2 * 720
    keys = 8 * 2 * 320 * (720 + 320)
    rest = smolvla.decoder.parameters + (smolvla.vision.parameters if smolvla.vision else 0)
    assert smolvla.parameters - rest == 16 * layers + keys + 720


def test_a_smolvla_without_its_base_is_planned_by_name() -> None:
    with pytest.raises(RequestError, match="plan with --model smolvla"):
        config_size({"type": "smolvla", "input_features": {}}, "x")


def test_a_checkpoint_is_planned_with_its_expert(tmp_path: Path) -> None:
    tiny = TinyPi0()
    found = find_size(str(make_pi0(tmp_path, tiny)))
    assert found.action == ActionSize(tiny.hidden, tiny.ffn, tiny.heads, tiny.horizon + 1, tiny.steps, 3)
    assert found.picture(640, 480) == (3 * tiny.vlm.vision_tokens, 3)


def test_the_expert_reads_its_weights_and_the_prompt_in_each_step() -> None:
    profile, pi0, text, image = load_profile("agx-orin-64"), KNOWN["pi0"], 16, 768
    plan = make_plan(
        pi0, Workload(text, image, 0, 3), PlannedMethods([None, 10]), precisions_by_name(pi0, ["bf16"]), profile
    )
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
    parts = precisions_by_name(fewer, ["bf16"])
    half = (
        make_plan(fewer, Workload(text, image, 0, 3), PlannedMethods([None]), parts, profile)
        .depths[0]
        .precisions["bf16"]
        .phases
    )
    whole = plan.depths[0].precisions["bf16"].phases
    assert half is not None
    assert whole is not None
    assert 2 * half["expert"].ms == pytest.approx(whole["expert"].ms)


@pytest.mark.parametrize("device", ["agx-orin-64", "agx-thor"])
@pytest.mark.parametrize(("model", "decoded"), [("pi0", 0), ("pi05", 0), ("smolvla", 0), ("openvla-7b", 6)])
def test_hertz_by_k_are_in_the_json_and_rise_as_k_falls(model: str, decoded: int, device: str) -> None:
    words = ["--model", model, "--profile", device, "--k", "none,14,10", "--precision", "int8", "--json"]
    done = CliRunner().invoke(cli.plan, words)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    costs = [depth["precisions"]["int8"] for depth in found["depths"]]
    hertz = [cost["hertz"] for cost in costs]
    times = [cost["latency_ms"] for cost in costs]
    last = [time.get("expert", 0) + decoded * time.get("decode_per_token", 0) for time in times]
    wanted = [1000 / (time["vision"] + time["prefill"] + more) for time, more in zip(times, last, strict=True)]
    assert hertz == pytest.approx(wanted)
    assert hertz == sorted(set(hertz))
    if decoded:  # the prompt gives the first of an action's tokens
        assert found["max_new_tokens"] == found["model"]["action_tokens"] == decoded + 1


def test_fewer_image_tokens_are_more_actions_a_second() -> None:
    words = ["--model", "openvla-7b", "--profile", "agx-orin-64", "--k", "none", "--precision", "int8", "--json"]
    found = [
        json.loads(CliRunner().invoke(cli.plan, [*words, "--reduce", spec]).stdout)["depths"][0]["precisions"]["int8"]
        for spec in ("none", "fastv:k=2,ratio=0.5")
    ]
    assert found[0]["hertz"] < found[1]["hertz"]


def test_a_model_that_answers_in_words_has_no_hertz() -> None:
    words = ["--model", "llava-1.5-7b", "--profile", "agx-orin-64", "--precision", "int8", "--k", "none", "--json"]
    found = json.loads(CliRunner().invoke(cli.plan, words).stdout)
    assert "hertz" not in found["depths"][0]["precisions"]["int8"]
    assert "action_tokens" not in found["model"]


def test_the_table_says_that_no_engine_was_looked_up() -> None:
    done = CliRunner().invoke(cli.plan, ["--model", "pi0", "--profile", "agx-orin-64", "--precision", "int8"])
    assert "an answer: 3 cameras, all pictures new, and 10 steps of the expert" in done.stdout
    assert "which engine answers is not looked up" in " ".join(done.stdout.split())
    assert "an estimate, not a measurement" in " ".join(done.stdout.split())
    refused = CliRunner().invoke(cli.plan, ["--model", "pi0", "--profile", "agx-orin-64", "--device", "tensorrt"])
    assert refused.exit_code == 2
    assert "this one acts" in refused.stderr


def test_the_table_of_a_model_whose_tokens_are_actions_has_hertz_and_an_engine() -> None:
    words = ["--model", "openvla-7b", "--profile", "agx-orin-64", "--precision", "int8"]
    done = CliRunner().invoke(cli.plan, words)
    assert "an answer: a new picture and 7 tokens, one for each number of an action" in done.stdout
    assert "counted below for TensorRT" in done.stdout
    assert "Hz" in done.stdout
