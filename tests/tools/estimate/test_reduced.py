"""Image tokens per layer that a plan counts under reductions, and those that answers have."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from tests.support.exported import Models
from tests.support.tiny import Tiny, random_image

from vtx import cli
from vtx.runtime.api.options import Options
from vtx.runtime.errors import RequestError, UnsupportedModelError
from vtx.runtime.policies.spec import parse
from vtx.tools.estimate.plan import PlannedMethods, Workload, make_plan, reduce_counts
from vtx.tools.estimate.sizes import KNOWN, ModelSize, bundle_size

SEVEN = KNOWN["llava-1.5-7b"]
ANSWERED = (
    "fastv:k=2,ratio=0.5", "fastv:k=2,ratio=0.3", "cls:keep=0.3", "cdpruner:keep=5", "cdpruner:keep=0.3,text=none",
    "dart:keep=0.6,k=2,pivots=1,text_pivots=2", "dart:keep=7,k=0", "divprune:keep=0.3", "divprune:keep=5", "random",
    "random:keep=3,seed=5", "visionzip:dominant=4,contextual=2",
    "hiprune:keep=5,layer=1", "cls:keep=0.75+fastv:k=3,ratio=0.5", "pyramiddrop:layers=1/3/4,ratio=0.7",
)  # fmt: skip


def counts(spec: str, model: ModelSize = SEVEN, vision: int = 576) -> tuple[int, ...]:
    return reduce_counts(parse(spec), model, vision).vision_tokens


@pytest.mark.sampled
@pytest.mark.parametrize("spec", ANSWERED)
def test_answers_have_the_tokens_that_the_plan_counts(models: Models, spec: str) -> None:
    model = models(Tiny(), (5,), "fp32", ANSWERED)
    with model.open(random_image(1)) as image:
        stats = image.ask("what is red?", None, Options(2, ignore_eos=True), reduce=spec).stats
    assert stats.vision_tokens_kept == counts(spec, bundle_size(model.bundle), 16)
    assert min(stats.vision_tokens_kept) < 16


def test_each_method_has_its_schedule_for_given_counts() -> None:
    next_7b = KNOWN["llava-next-7b"]
    for spec, kept in (("cdpruner:64", 5 * 64), ("cdpruner:keep=0.25,text=none", 5 * 144), ("visionzip:128", 640),
                       ("hiprune:64", 320),
                       ("divprune", 282), ("random:keep=0.1", 288), ("dart:keep=100,k=0", 100),
                       ("cls:keep=0.1", 288)):  # fmt: skip
        assert reduce_counts(parse(spec), next_7b, 2880, 5).vision_tokens == (kept,) * 32
    for spec, kept in (("dart:keep=320", 324), ("fastv:k=2,ratio=0.9", 288)):
        assert reduce_counts(parse(spec), next_7b, 2880, 5).vision_tokens == (2880,) * 2 + (kept,) * 30


def test_flops_are_those_that_run_and_beside_them_darts_own_count() -> None:
    """LLaVA-NeXT-7B, 320 of 2,880: two full layers and 324 tokens run, 15.8%; the paper says 12.8%."""
    h, m, s = 4096, 11008, 2880

    def layer(tokens: int, matrices: int) -> int:
        return tokens * (4 * h * h + matrices * h * m) + 2 * tokens * tokens * h

    found = reduce_counts(parse("dart:keep=320"), KNOWN["llava-next-7b"], s, 5)
    assert found.image_ratio == pytest.approx((2 * layer(s, 3) + 30 * layer(324, 3)) / (32 * layer(s, 3)), abs=1e-9)
    assert round(found.image_ratio, 3) == 0.158
    assert found.paper_ratio == pytest.approx((layer(s, 2) + 31 * layer(324, 2)) / (32 * layer(s, 2)), abs=1e-9)
    assert round(found.paper_ratio or 0, 3) == 0.128
    for spec in ("fastv", "dart:keep=320,k=0", "cdpruner:64", "dart:keep=320+fastv:k=5"):
        assert reduce_counts(parse(spec), KNOWN["llava-next-7b"], s, 5).paper_ratio is None
    done = CliRunner().invoke(cli.plan, ["--model", "llava-next-7b", "--sequence", "2944", "--reduce", "dart:keep=320"])
    assert "the image alone in the decoder: 15.8% of the arithmetic, 12.8% as its paper counts" in done.stdout


def test_layers_that_run_ahead_of_a_cut_are_counted() -> None:
    """LLaVA-1.5-7B: 8 layers each of 576, 288, 144 and 72 tokens, and layers 9, 17, 25 again of 576, 288, 144."""
    h, m = 4096, 11008

    def layer(tokens: int) -> int:
        return tokens * (4 * h * h + 3 * h * m) + 2 * tokens * tokens * h

    found = reduce_counts(parse("pyramiddrop"), SEVEN, 576)
    assert found.vision_tokens == (576,) * 8 + (288,) * 8 + (144,) * 8 + (72,) * 8
    assert found.ahead == (9, 17, 25)
    runs = 8 * sum(map(layer, (576, 288, 144, 72))) + sum(map(layer, (576, 288, 144)))
    assert found.image_ratio == pytest.approx(runs / (32 * layer(576)), abs=1e-9)
    assert counts("pyramiddrop:ratio=0.7", vision=101)[-1] == 34  # floor(0.343 * 101), not of what was left
    full, cut = (
        make_plan(SEVEN, Workload(64, 576, 1), PlannedMethods((k,), reductions=parse("pyramiddrop")))
        for k in (None, 17)
    )
    plain = [make_plan(SEVEN, Workload(64, 576, 1), PlannedMethods((k,))).depths[0].total_flops for k in (9, 17)]
    assert full.depths[0].total_flops > cut.depths[0].total_flops
    assert plain[0] < cut.depths[0].total_flops < plain[1]


def test_what_depends_on_the_data_is_counted_in_full_and_said() -> None:
    found = reduce_counts(parse("mustdrop:192+fastv:k=20,ratio=0.5"), SEVEN, 576)
    assert found.vision_tokens == (576,) * 20 + (288,) * 12
    (assumed,) = found.assumed
    assert assumed.startswith("mustdrop: how many tokens leave depends on the picture")
    assert not reduce_counts(parse("cdpruner:128+fastv"), SEVEN, 576).assumed


@pytest.mark.parametrize(
    ("spec", "model", "error", "message"),
    [
        ("fastv:k=32", "llava-1.5-7b", RequestError, "after layer 32, and this model has 32 layers"),
        ("cls", "qwen2.5-vl-3b", UnsupportedModelError, "each token of this model covers 2 x 2 patches"),
        ("cls", "smolvlm2-500m", UnsupportedModelError, "each token of this model covers 4 x 4 patches"),
        ("cdpruner", "smolvlm2-500m", RequestError, "text between its tiles"),
    ],
)
def test_what_an_export_would_refuse_is_refused(spec: str, model: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        counts(spec, KNOWN[model])


def test_the_command_plans_with_a_reduction_at_every_k() -> None:
    words = ["--model", "llava-1.5-7b", "--k", "none,17", "--precision", "fp16", "--reduce", "fastv:k=2,ratio=0.5"]
    done = CliRunner().invoke(cli.plan, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["reduced"]["vision_tokens"] == [576] * 2 + [288] * 30
    none, withdrawn = found["depths"]
    assert none["kv_slots"] == [640] * 2 + [352] * 30
    assert withdrawn["kv_slots"] == [640] * 2 + [352] * 14 + [64] * 16
    slot = 2 * 2 * 32 * 128  # K and V, two bytes, 32 heads of 128
    assert none["precisions"]["fp16"]["kv_bytes"] == slot * (640 * 2 + 352 * 30)
    assert none["calflops_ratio"] == pytest.approx((640 * 2 + 352 * 30) / (640 * 32))
    shown = CliRunner().invoke(cli.plan, words).stdout
    assert "vision tokens in layers 1-2: 576, 3-32: 288" in shown
    assert "assumed" not in shown
    assumed = CliRunner().invoke(cli.plan, [*words[:-1], "mustdrop:192"]).stdout
    assert "assumed: mustdrop: how many tokens leave depends on the picture and the question" in assumed
