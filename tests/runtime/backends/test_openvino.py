"""The OpenVINO backend answers as the reference does, and as itself afresh whatever came before."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.support import bundles
from tests.support.exported import KS, QUESTIONS, THREADS, Models, greedy, policy, prompt
from tests.support.fixtures import Checkpoints, References
from tests.support.gates import plan_with_gates, random_gate, write_gates
from tests.support.near import assert_near
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.backends.openvino import backend as engine
from vtx.runtime.backends.openvino.cache import OpenvinoCacheContext
from vtx.runtime.backends.slots import SlotCounter
from vtx.runtime.report.golden import check_golden
from vtx.runtime.session.session import Prompt, Session
from vtx.runtime.vision.tokens import TokenStates

openvino = pytest.importorskip("openvino", reason='openvino is not installed; pip install "vtx-edge[openvino]"')

STEPS = 12
TOLERANCE = 1e-4
SAME = 1e-5  # between two runs of the same rows in other company
FP16_TOLERANCE = 0.13  # as in test_parity: on logits that reach 12
BF16_TOLERANCE = 0.5  # three times the largest difference seen, 0.16
DEPTHS = (None, *KS)
VARIANTS = {
    "llama-clip-gqa": Tiny(),
    "llama-clip-one-kv-head": Tiny(kv_heads=1, head_dim=24, rope="llama3", tied=True),
    "llama-siglip-biases": Tiny(vision="siglip", select="full", attention_bias=True, mlp_bias=True, names="saved"),
    "mistral-siglip-tied": Tiny(text="mistral", vision="siglip", select="full", head_dim=24, tied=True, kv_heads=4),
    "qwen2-clip-bytes": Tiny(text="qwen2", select="full", projector_bias=False, tokenizer="bytes", theta=1e6),
}
OPTIONS = Options(max_new_tokens=STEPS, ignore_eos=True)
Get = Callable[..., Model]
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def bundle_models(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Models:
    return Models(tmp_path_factory.mktemp("openvino"), tiny_checkpoint, ("ort", "plain"))


@pytest.fixture(scope="module")
def models(bundle_models: Models) -> Get:
    """`models(tiny, precision, compute)`: that bundle on OpenVINO."""
    loaded: dict[Any, Model] = {}

    def get(tiny: Tiny = Tiny(), precision: str = "fp32", compute: str = "f32") -> Model:  # noqa: B008 - frozen
        key = tiny, precision, compute
        if key not in loaded:
            folder = bundle_models(tiny, KS, precision).bundle.folder
            loaded[key] = load(folder, device="openvino", compute=compute, threads=THREADS)
        return loaded[key]

    return get


@pytest.fixture(scope="module")
def model(models: Get) -> Model:
    return models()


@pytest.fixture(scope="module")
def fresh(model: Model, prompts: list[Prompt]) -> dict[tuple[int, int | None], Logits]:
    """Logits [STEPS, vocab] of a fresh session for each prompt and K."""
    return {(i, k): greedy(model, asked, k, STEPS).logits for i, asked in enumerate(prompts) for k in DEPTHS}


# --- parity ---------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "precision", "compute", "tolerance"),
    [
        ("llama-clip-gqa", "fp16", "f32", FP16_TOLERANCE),
        ("llama-clip-one-kv-head", "fp32", "bf16", BF16_TOLERANCE),
        ("llama-siglip-biases", "fp16", "bf16", BF16_TOLERANCE),
        ("mistral-siglip-tied", "fp32", "bf16", BF16_TOLERANCE),
        ("qwen2-clip-bytes", "fp16", "f32", FP16_TOLERANCE),
    ],
)
def test_narrower_weights_and_arithmetic_stay_within_their_tolerance(
    models: Get, reference: References, name: str, precision: str, compute: str, tolerance: float,
    needs_arithmetic: Callable[[str], None],
) -> None:  # fmt: skip
    """Along the reference's own answer, so that one narrow choice does not part the two."""
    needs_arithmetic(compute)
    tiny, image = VARIANTS[name], random_image(0)
    model, judge = models(tiny, precision, compute), reference(tiny)
    messages = prompt_messages(QUESTIONS[2])
    inputs, asked = judge.inputs(messages, [image]), prompt(model, messages, [image])
    for k in (None, *KS):
        wanted = judge.greedy(inputs, k, STEPS)
        found = greedy(model, asked, k, STEPS, forced=wanted.ids)
        assert_near(found.logits, wanted.logits, tolerance)
        assert np.abs(found.logits - wanted.logits.numpy()).max() > TOLERANCE, "it did not compute more narrowly"


def test_the_token_ids_are_those_of_onnxruntime(bundle_models: Models, model: Model) -> None:
    other = bundle_models(Tiny())
    for words, k in itertools.product(QUESTIONS, DEPTHS):
        answers = [m.open(random_image(3)).ask(words, k, OPTIONS) for m in (model, other)]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].stats.kv_slots == answers[1].stats.kv_slots
        assert answers[0].stats.kv_bytes == answers[1].stats.kv_bytes
        assert [(a.stats.device, a.stats.compute) for a in answers] == [("openvino", "f32"), ("cpu", "f32")]


def test_gates_give_the_odds_of_onnxruntime(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = write_gates(tmp_path / "gates.safetensors", {3: random_gate(3), 5: random_gate(5)})
    folder = run_export(
        plan_with_gates(tiny_checkpoint(), file, (3, 5)), tmp_path / "b", force=False, report=bundles.IGNORE
    ).folder
    one, other = (load(folder, device=device, threads=THREADS).backend for device in ("openvino", "cpu"))
    for k, rows in itertools.product((3, 5), (1, 2, 17)):
        hidden = rng.standard_normal((rows, 64), np.float32)
        assert_near(one.gate(k, hidden), other.gate(k, hidden), 1e-6)


# --- reductions -----------------------------------------------------------------------------------

REDUCTIONS = (
    "mustdrop:gamma=0.02,alpha=0.05,tau=0.5,key=0.1,layers=3/7/11",
    "lsm:tau=0.5",
    "cls:keep=0.4",
    "fastv:k=2",
)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> list[Model]:
    """One bundle exported for reductions, on OpenVINO and on onnxruntime."""
    checkpoint = str(tiny_checkpoint(Tiny(layers=12, image=126, context=768)))
    options = ExportOptions(checkpoint, (4, 9), "fp32", dialects=("ort", "plain"), reductions=REDUCTIONS)
    folder = tmp_path_factory.mktemp("reduced") / "bundle"
    bundles.export_with(options, folder)
    return [load(folder, device=device, threads=THREADS) for device in ("openvino", "cpu")]


def test_scores_are_those_of_onnxruntime(reduced: list[Model]) -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((30, 64), np.float32)
    number = next(n for n, spec in enumerate(stage_specs(reduced[0])) if spec.query)
    found = []
    for model in reduced:
        cache = model.backend.stage(number, 64)
        cache.append(TokenStates(rows[:20]), np.arange(20))
        slots = np.array([3, 4, 9])
        aside = cache.read(slots)
        cache.write(np.arange(20, 23), aside, length=23)
        cache.append(TokenStates(rows[20:]), np.arange(23, 33), query=True)
        found.append([*cache.attention(), *cache.attention(last_only=True)])
    for one, other in zip(*found, strict=True):
        assert one.shape == (33,)
        assert_near(one, other, 1e-5)


def test_scores_over_a_narrow_cache_are_near_those_over_a_wide_one(
    reduced: list[Model], needs_arithmetic: Callable[[str], None]
) -> None:
    needs_arithmetic("bf16")
    narrow = load(reduced[0].bundle.folder, device="openvino", compute="bf16", threads=THREADS)
    number = next(n for n, spec in enumerate(stage_specs(narrow)) if spec.query)
    rows, found = np.random.default_rng(6).standard_normal((40, 64), np.float32), []
    for model in (narrow, reduced[0]):
        cache = model.backend.stage(number, 64)
        cache.append(TokenStates(rows), np.arange(40), query=True)
        aside = cache.read(np.arange(5, 40))
        cache.write(np.arange(5, 40), aside, length=40)
        found.append(np.concatenate(cache.attention()))
    np.testing.assert_allclose(*found, atol=5e-3 * found[1].max(), rtol=0)
    assert (found[0] != found[1]).any()


# --- the engine's form ----------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tiny", [Tiny(), Tiny(kv_heads=4), Tiny(kv_heads=1)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_layer_attends_in_one_kernel_over_its_cache(models: Get, tiny: Tiny, precision: str) -> None:
    """Without the kernel each token would copy the whole cache."""
    for stage, spec in zip(models(tiny, precision).backend.stages, stage_specs(models(tiny, precision)), strict=True):  # type: ignore[attr-defined]
        kinds = Counter(
            node.get_rt_info()["layerType"].astype(str) for node in stage.compiled.get_runtime_model().get_ops()
        )
        assert kinds["PagedAttention"] == spec.layers, kinds
        assert not {"Softmax", "MatMul", "ScaledDotProductAttention", "MemoryInput"} & set(kinds)


@pytest.mark.parametrize(("precision", "compute"), [("fp32", "f32"), ("fp16", "f32"), ("fp16", "bf16")])
def test_rows_fill_the_arrays_in_place_and_no_slot_beyond_is_read(
    models: Get, precision: str, compute: str, needs_arithmetic: Callable[[str], None]
) -> None:
    needs_arithmetic(compute)
    backend = models(precision=precision, compute=compute).backend
    rows = np.random.default_rng(7).standard_normal((70, 64), np.float32)
    found = []
    for bits in (0, -1):  # zeros, and what is not a number
        cache = backend.stage(1, 100)
        for layer in cache.kv:
            layer.view(np.int8)[:] = bits
        chunks = [
            cache.append(TokenStates(rows[a:b]), np.arange(a, b)).copy() for a, b in itertools.pairwise((0, 37, 38, 70))
        ]
        found.append(np.concatenate(chunks))
        slots = np.stack(cache.read(np.arange(70))).view(np.int8)
        assert (slots != bits).mean() > 0.9
    assert np.isfinite(found[0]).all()
    assert np.array_equal(*found)


def test_a_prompt_in_chunks_equals_one_at_once(model: Model) -> None:
    rows = np.random.default_rng(8).standard_normal((90, 64), np.float32)
    whole = model.backend.stage(1, 100).append(TokenStates(rows), np.arange(90))
    for cut in (2, 31, 32, 33, 64, 88):
        cache = model.backend.stage(1, 100)
        parts = [cache.append(TokenStates(rows[a:b]), np.arange(a, b)).copy() for a, b in ((0, cut), (cut, 90))]
        assert np.array_equal(np.concatenate(parts), whole), cut


def test_many_rows_run_in_parts_of_nearly_the_same_size_and_give_the_same(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ran = np.random.default_rng(8).standard_normal((90, 64), np.float32), list[int]()
    whole = model.backend.stage(1, 100).append(TokenStates(rows), np.arange(90))
    monkeypatch.setattr(engine, "most_tokens", lambda *_: 40)
    with load(model.bundle.folder, device="openvino", threads=THREADS) as other:
        cache = other.backend.stage(1, 100)
        filled = SlotCounter.append

        def counted(self: Any, hidden: Any, *args: Any, **keywords: Any) -> Any:
            ran.append(len(hidden))
            return filled(self, hidden, *args, **keywords)

        monkeypatch.setattr(SlotCounter, "append", counted)
        assert np.array_equal(cache.append(TokenStates(rows), np.arange(90)), whole)
        assert ran == [30, 30, 30]
        assert cache.length == 90
        cache.append(TokenStates(rows[:1]), np.arange(90, 91))
        assert ran[3:] == [1]


def test_rows_that_nobody_asks_for_fill_their_slots_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one run and in several, of which some are asked for nothing."""
    hidden, asked = np.random.default_rng(9).standard_normal((90, 64), np.float32), np.array([0, 3, 4, 70, 89])
    usual = model.backend.stage(1, 100)
    whole, follows = (
        usual.append(TokenStates(hidden), np.arange(90)),
        usual.append(TokenStates(hidden[:1]), np.arange(90, 91)).copy(),
    )
    for most in (100, 30, 20):
        monkeypatch.setattr(engine, "most_tokens", lambda *_, most=most: most)
        with load(model.bundle.folder, device="openvino", threads=THREADS) as other:
            cache = other.backend.stage(1, 100)
            found = cache.append(TokenStates(hidden), np.arange(90), outputs=asked)
            assert found.shape == (5, 64)
            assert_near(found, whole[asked], SAME)
            assert np.array_equal(cache.read(np.arange(90)), usual.read(np.arange(90)))
            assert_near(cache.append(TokenStates(hidden[:1]), np.arange(90, 91)), follows, SAME)
            cache.keep(0)
            assert cache.append(TokenStates(hidden), np.arange(90), outputs=np.zeros(0, np.int64)).shape == (0, 64)


@pytest.mark.parametrize("later", [KS[1], None])
def test_the_image_s_hidden_states_end_before_its_k_until_another_one_reads_them(
    model: Model, prompts: list[Prompt], fresh: dict[tuple[int, int | None], Logits], later: int | None
) -> None:
    """Then the last stage that the image reached has them, from which a still later K goes on; none before it."""
    session, first = Session(model.backend, model.manifest), KS[0]
    whole = prompts[1].prefix_length
    text = int((~prompts[1].is_vision[:whole]).sum())
    before = {stage.last + 1: number for number, stage in enumerate(model.manifest.stages)}
    reached = later or max(before)
    steps = [
        (first, 0, {first: text}),
        (first, first - 1, {first: text}),
        (later, 0, {first: text, reached: whole}),
        (first, first - 1, {first: text, reached: whole}),
        (None, reached - 1, {first: text, max(before): whole}),
    ]
    for k, layers, rows in steps:
        done = session.prefill(prompts[1], policy(k))
        assert_near(done.logits, fresh[1, k][0], SAME)
        assert done.reused_layers == layers
        assert {cut: len(session.caches.segments[before[cut], True].states) for cut in rows} == rows
    if later is not None:
        assert len(session.caches.segments[before[later], True].states) == text


def stage_specs(model: Model) -> Sequence[Any]:
    return model.manifest.stages


def test_caches_share_their_stage_s_weights(models: Get) -> None:
    """Front and tail, with the image and without, are requests over one compiled graph."""
    model = models(Tiny(layers=8, hidden=768, heads=12, kv_heads=12, head_dim=64))
    weights = sum(r.bytes for name, r in model.manifest.files.items() if name.startswith("weights/"))
    rows, process = np.zeros((8, 768), np.float32), psutil.Process()
    caches = [model.backend.stage(number, 64) for number in range(5)]
    for cache in caches:
        cache.append(TokenStates(rows), np.arange(8))
    before = process.memory_info().rss
    more = [model.backend.stage(number, 64) for number in range(5) for _ in range(3)]
    for cache in more:
        cache.append(TokenStates(rows), np.arange(8))
    assert weights > 1 << 26
    assert process.memory_info().rss - before < weights / 4


# --- one prompt after another ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("counted", [True, False], ids=["after", "within"])
def test_rows_that_an_interrupt_left_behind_are_forgotten(model: Model, rows: int, *, counted: bool) -> None:
    """An interrupt comes before the rows are counted, or after; either way `keep` takes them back."""
    rng = np.random.default_rng(2)
    first, second = (rng.standard_normal((n, 64), np.float32) for n in (9, 4))
    left = rng.standard_normal((rows, 64), np.float32)
    caches = [model.backend.stage(1, 64) for _ in range(2)]
    for cache in caches:
        cache.append(TokenStates(first), np.arange(9))
    caches[1].append(TokenStates(left), np.arange(9, 9 + rows))
    if counted:
        caches[1].keep(9)
    else:
        caches[1].length = 9
    one, other = (cache.append(TokenStates(second), np.arange(9, 13)).copy() for cache in caches)
    assert np.array_equal(one, other)


def test_blocks_are_told_again_where_an_interrupt_came_while_they_were(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(3).standard_normal((40, 64), np.float32)
    one, other = (model.backend.stage(1, 64) for _ in range(2))
    for cache in (one, other):
        cache.append(TokenStates(rows[:31]), np.arange(31))
    shared = OpenvinoCacheContext.shared

    def interrupted(self: OpenvinoCacheContext, array: NDArray[Any]) -> Any:
        if array.tolist() == [0, 1]:  # the blocks in use
            raise KeyboardInterrupt
        return shared(self, array)

    monkeypatch.setattr(OpenvinoCacheContext, "shared", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            one.append(TokenStates(rows[31:]), np.arange(31, 40))
    monkeypatch.undo()
    found, wanted = (cache.append(TokenStates(rows[31:]), np.arange(31, 40)) for cache in (one, other))
    assert np.array_equal(found, wanted)


def test_slots_kept_are_those_that_were_there(model: Model) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((40, 64), np.float32)
    cache = model.backend.stage(1, 64)

    def equals_fresh(kept: NDArray[np.float32], added: NDArray[np.float32]) -> None:
        cache.keep(len(kept))
        fresh = model.backend.stage(1, 64)
        if len(kept):
            fresh.append(TokenStates(kept), np.arange(len(kept)))
        positions = np.arange(len(kept), len(kept) + len(added))
        assert np.array_equal(cache.append(TokenStates(added), positions), fresh.append(TokenStates(added), positions))

    equals_fresh(rows[:0], rows[:20])
    equals_fresh(rows[:15], rows[20:24])
    equals_fresh(rows[:15], rows[24:30])
    equals_fresh(rows[:10], rows[30:38])
    equals_fresh(np.concatenate([rows[:10], rows[30:34]]), rows[:2])
    equals_fresh(rows[:0], rows[20:40])
    equals_fresh(rows[20:30], rows[:3])


def test_threads_answer_side_by_side_as_alone(model: Model) -> None:
    wanted = {words: model.open(random_image(1)).ask(words, 3, OPTIONS).token_ids for words in QUESTIONS}
    found: dict[str, Any] = {}

    def run(words: str) -> None:
        with model.open(random_image(1)) as conversation:
            found[words] = [conversation.ask(words, 3, OPTIONS).token_ids for _ in range(3)]

    threads = [threading.Thread(target=run, args=(words,)) for words in QUESTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {words: [ids] * 3 for words, ids in wanted.items()}


# --- what is refused ------------------------------------------------------------------------------


def test_the_number_of_threads_is_what_was_asked_for(model: Model) -> None:
    for stage in model.backend.stages:  # type: ignore[attr-defined]
        assert stage.compiled.get_property("INFERENCE_NUM_THREADS") == THREADS


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_weights_answer_as_on_onnxruntime_and_stay_narrow(
    models: Get, bundle_models: Models, precision: str
) -> None:
    """Both quantise the rows, too, each in its own way; neither may be far from the other."""
    tiny = Tiny(hidden=128, ffn=192)
    exact, one, other = bundle_models(tiny), models(tiny, precision), bundle_models(tiny, precision=precision)
    asked = [prompt(m, prompt_messages(QUESTIONS[2]), [random_image(0)]) for m in (exact, one, other)]
    for k in (None, 3):
        ids = greedy(exact, asked[0], k, STEPS).ids
        found = [greedy(m, a, k, STEPS, forced=ids).logits for m, a in zip((one, other), asked[1:], strict=True)]
        assert_near(found[0], found[1], 2.0)  # three times the largest difference seen
    for stage in one.backend.stages:  # type: ignore[attr-defined]
        matrices = [n for n in stage.compiled.get_runtime_model().get_ops() if n.get_output_size() and is_matrix(n)]
        assert matrices
        assert {n.get_output_element_type(0).bitwidth for n in matrices} == {8 if precision == "int8" else 4}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("precision", "block"), [("int4", 64), ("int8", 64), ("int4", 128), ("int8", 128)])
def test_integers_in_blocks_of_either_size_compute_what_their_stored_weights_say(
    tiny_checkpoint: Checkpoints, tmp_path: Path, precision: str, block: int
) -> None:
    checkpoint = tiny_checkpoint(Tiny(hidden=256, ffn=384, heads=4, head_dim=64))
    blocks = {f"{precision}_block": block}
    plan = plan_export(ExportOptions(str(checkpoint), (3,), precision, **blocks))  # type: ignore[arg-type]
    made = run_export(plan, tmp_path / "b", force=False, report=lambda *_: None)
    tensors = {
        k: v
        for name in made.manifest.files
        if name.startswith("weights/")
        for k, v in made.header(name).tensors.items()
    }
    matrix = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    assert tensors[f"{matrix}.scales"].shape == (256, 384 // block)
    for device in ("cpu", "openvino"):
        with load(made.folder, device=device, threads=THREADS) as model:
            checks = list(check_golden(model))
            assert len(checks) == 5
            assert all(check.difference <= check.limit for check in checks), checks
            stages = getattr(model.backend, "stages", [])
            groups = {
                int(s.compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")) for s in stages if device == "openvino"
            }
            assert groups == ({block} if device == "openvino" else set())


def is_matrix(node: Any) -> bool:
    """Whether this is a constant of as many values as one of the decoder's projections has."""
    shape = node.get_output_partial_shape(0)
    constant = node.get_rt_info()["layerType"].astype(str) == "Const"
    return constant and shape.is_static and int(np.prod(node.get_output_shape(0))) >= 64 * 128
