"""OpenVLA: two towers side by side and tokens that are actions, against a statement in plain PyTorch.

`VTX_CONFIGURATIONS=20` sets how many random configurations are compared.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import ORT, export
from tests.support.commands import invoke
from tests.support.exported import THREADS, greedy, prompt
from tests.support.families.openvla import (
    BRIDGE,
    DINO,
    EMPTY,
    FASTV,
    KS,
    NUMBERS,
    OTHER,
    SIGLIP,
    WORDS,
    Judge,
    TinyOpenVLA,
    config_of,
    drawn,
    make_openvla,
    processor_of,
    with_towers,
)
from tests.support.json_files import write_json
from tests.support.near import assert_near
from tests.support.tiny import prompt_messages, random_image
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.exporter.checkpoint.assembly import open_checkpoint
from vtx.exporter.checkpoint.families.openvla import FAMILY, TOWERS
from vtx.exporter.checkpoint.families.registry import read_config
from vtx.exporter.checkpoint.spec import config_of as config_of_manifest
from vtx.exporter.checkpoint.spec import config_size, find_size
from vtx.exporter.graphs.vision import vision_tensors
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model
from vtx.runtime.bundle.spec.action_spec import ActionBins, ActionRange
from vtx.runtime.errors import (
    BundleError,
    CheckpointError,
    ContextError,
    DeadlineError,
    RequestError,
    UnsupportedModelError,
)
from vtx.runtime.report.golden import check_golden
from vtx.tools.estimate.flops import encode_flops
from vtx.tools.estimate.sizes import KNOWN
from vtx.tools.estimate.weights import all_weights, precisions_of

TOLERANCE = 1e-4
TINY = TinyOpenVLA()
PICTURE = random_image(0, (80, 60))


@pytest.fixture(scope="module", autouse=True)
def towers() -> Iterator[None]:
    patch = with_towers(TINY)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def checkpoint(openvla: tuple[Path, Path]) -> Path:
    return openvla[0]


@pytest.fixture(scope="module")
def folder(openvla: tuple[Path, Path]) -> Path:
    return openvla[1]


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with load(folder, device="cpu", threads=THREADS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> Judge:
    return Judge(checkpoint, TINY)


def compare(model: Model, judge: Judge, seed: int, ks: tuple[int, ...], statistics: Any, count: int) -> None:
    image = random_image(seed, (90, 50))
    asked = prompt(model, prompt_messages(WORDS.lower()), [image])
    text = asked.ids[~asked.is_vision].tolist()
    assert text == judge.ids(WORDS)
    assert asked.is_vision[1 : 1 + judge.tiny.tokens].all()
    for k in (None, *ks):
        ids, logits = judge.greedy(image, WORDS, k, count)
        found = greedy(model, asked, k, count)
        assert found.ids == ids
        assert_near(found.logits, np.stack([row.numpy() for row in logits]), TOLERANCE)
        actions = model.act(image, WORDS, k=k, reduce=None, unnorm_key="bridge_orig")
        assert model.actor.token_ids == tuple(ids)
        assert actions.shape == (1, count)
        assert_near(actions[0], judge.actions(ids, statistics), 1e-5)


def test_ids_logits_and_actions_are_those_of_the_statement(model: Model, judge: Judge) -> None:
    compare(model, judge, 1, KS, BRIDGE["action"], NUMBERS)
    ids = {k: judge.greedy(random_image(1, (90, 50)), WORDS, k, NUMBERS)[0] for k in (None, *KS)}
    assert len({*map(tuple, ids.values())}) > 1, "K changes nothing, so the test shows nothing"
    assert len({*ids[None]}) > 1


def test_a_prompt_ends_with_the_empty_token_and_the_instruction_in_small_letters(model: Model, judge: Judge) -> None:
    asked = prompt(model, prompt_messages("block the robot"), [PICTURE])
    assert asked.ids[-1] == EMPTY
    assert asked.ids[~asked.is_vision].tolist() == judge.ids("Block the ROBOT")
    small, large = (model.act(PICTURE, words) for words in ("block the robot", "Block the ROBOT"))
    np.testing.assert_array_equal(small, large)
    typed = model.act(PICTURE, "take </S> the <PAD>")  # special tokens in an instruction are text
    assert typed.shape == (1, NUMBERS)


def test_the_towers_features_are_those_of_the_statement(model: Model, judge: Judge) -> None:
    for picture in (PICTURE, random_image(3, (31, 97)).convert("L")):
        pixels = model.loaded.images.prepare(picture).views
        found = model.backend.vision(np.asarray(pixels)).hidden.reshape(TINY.tokens, -1)
        assert_near(found, judge.features(picture).numpy(), 2e-5)


@pytest.mark.representative
def test_a_second_step_is_that_of_a_fresh_model(folder: Path, judge: Judge) -> None:
    steps = [(PICTURE, "pick"), (random_image(5), "pick"), (random_image(5), "take red"), (PICTURE, "take red")]
    with load(folder, device="cpu", threads=THREADS) as own:
        for (image, words), encoded in zip(steps, (1, 1, 0, 1), strict=True):
            found = own.act(image, words, k=5, reduce=None)
            assert own.actor.encoded == encoded
            ids, _ = judge.greedy(image, words, 5, NUMBERS)
            assert_near(found[0], judge.actions(ids, BRIDGE["action"]), 1e-5)
        seconds = own.actor.seconds
        assert seconds.tower > 0
        assert seconds.prompt > 0


def test_a_reduction_leaves_the_tokens_that_the_statement_leaves(model: Model, judge: Judge) -> None:
    for seed in range(3):
        image = random_image(seed, (70, 90))
        found = model.act(image, WORDS, k=None, reduce=FASTV)
        ids, _ = judge.greedy(image, WORDS, None, NUMBERS, (2, TINY.tokens // 2))
        assert_near(found[0], judge.actions(ids, BRIDGE["action"]), 1e-5)
        np.testing.assert_array_equal(model.act(image, WORDS, k=None), found)  # the bundle's default
        everything = model.act(image, WORDS, k=None, reduce="divprune:keep=16")
        np.testing.assert_array_equal(everything, model.act(image, WORDS, k=None, reduce=None))


@pytest.mark.parametrize("spec", ["cls", "mustdrop:layers=3/5", "visionzip", "hiprune"])
def test_methods_that_look_into_one_tower_are_refused_by_name(checkpoint: Path, spec: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{spec.partition(':')[0]} reads the patches of a single tower"):
        plan_export(ExportOptions(str(checkpoint), (3,), "fp32", reductions=(spec,), dialects=ORT))


def test_golden_vectors_hold(model: Model) -> None:
    assert all(check.passed for check in check_golden(model))


@pytest.mark.slow
def test_openvino_gives_the_same_tokens(model: Model, folder: Path) -> None:
    pytest.importorskip("openvino", reason="the [openvino] extra is not installed")
    with load(folder, device="openvino", threads=1) as other:
        for k in (None, 5):
            found = [m.act(PICTURE, WORDS, k=k, reduce=None) for m in (model, other)]
            np.testing.assert_array_equal(found[0], found[1])


def test_normalised_actions_are_the_middles_of_bins(model: Model, judge: Judge) -> None:
    found = model.act(PICTURE, WORDS, normalized=True)
    ids = list(model.actor.token_ids)
    assert_near(found[0], judge.actions(ids, None), 1e-6)


@pytest.mark.slow
def test_several_data_sets_need_a_name(tmp_path: Path) -> None:
    checkpoint = make_openvla(tmp_path / "checkpoint", TINY, norm_stats={"bridge_orig": BRIDGE, "fractal": OTHER})
    bundle, judge = export(checkpoint, tmp_path / "bundle", (3,), dialects=ORT), Judge(checkpoint, TINY)
    with load(bundle.folder, device="cpu", threads=THREADS) as two:
        for name, statistics in (("bridge_orig", BRIDGE), ("fractal", OTHER)):
            count = len(statistics["action"]["q01"])
            found = two.act(PICTURE, WORDS, k=3, unnorm_key=name)
            ids, _ = judge.greedy(PICTURE, WORDS, 3, count)
            assert_near(found[0], judge.actions(ids, statistics["action"]), 1e-5)
        with pytest.raises(
            RequestError, match=r"the statistics of 2 data sets, .* as unnorm_key: bridge_orig, fractal"
        ):
            two.act(PICTURE, WORDS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": []}, "0 pictures are given, and this model sees one"),
        ({"images": [PICTURE, PICTURE]}, "2 pictures are given, and this model sees one"),
        ({"images": {"base": PICTURE}}, "names no cameras"),
        ({"instruction": " "}, "say in words"),
        ({"instruction": 3}, "say in words"),
        ({"instruction": "red " * 300}, "shorten"),
        ({"state": np.zeros(7)}, "state: this model makes actions of a picture and an instruction alone"),
        ({"noise": np.zeros(7), "seed": 1}, "noise and seed: this model"),
        ({"steps": 4}, "steps: this model"),
        ({"unnorm_key": "fractal"}, "unnorm_key 'fractal' is not a data set of this model; its data sets are bridge"),
        ({"unnorm_key": 3}, "unnorm_key 3 is not"),
        ({"deadline_ms": 0}, "deadline_ms is 0; it must be milliseconds above 0"),
        ({"k": 4}, "4"),
        ({"reduce": "cls"}, "cls reads the patches of a single tower"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model: Model, changed: dict[str, Any], message: str) -> None:
    with pytest.raises((RequestError, ContextError), match=message):
        model.act(**{"images": PICTURE, "instruction": WORDS, **changed})


def test_a_late_action_is_not_given(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineError, match="no actions within 1e-06 ms"):
        model.act(PICTURE, WORDS, deadline_ms=1e-6)
    looks = iter([0.0, 0.0, 9.0])  # the answer is there, and the time is over
    monkeypatch.setattr("vtx.runtime.api.acting.monotonic", lambda: next(looks))
    with pytest.raises(DeadlineError, match="9000 ms have passed"):
        model.act(PICTURE, WORDS, deadline_ms=8000)
    monkeypatch.undo()
    found = model.act(PICTURE, WORDS, deadline_ms=1e8)
    np.testing.assert_array_equal(found, model.act(PICTURE, WORDS))


class Ending:
    """A backend whose answers end at once."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def head(self, hidden: Any) -> Any:
        logits = self._backend.head(hidden)
        logits[..., 2] = 1e9
        return logits


def test_an_answer_that_ends_too_early_is_no_action(model: Model) -> None:
    ending = Model(model.bundle, Ending(model.backend), 0)
    with pytest.raises(BundleError, match=r"the answer has 1 of the 7 tokens of an action and ends \(end\)"):
        ending.act(PICTURE, WORDS)


def broken(**changed: Any) -> dict[str, Any]:
    return {"bridge_orig": {"action": {**BRIDGE["action"], **changed}}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_stats": None}, "config.json has no norm_stats"),
        ({"norm_stats": {}}, "config.json has no norm_stats"),
        ({"norm_stats": {"bridge_orig": {}}}, "norm_stats of 'bridge_orig' has no statistics of actions"),
        ({"norm_stats": broken(q99=[0.5] * 6)}, "norm_stats of 'bridge_orig' have 7 of q01, 6 of q99, 7 of mask"),
        ({"norm_stats": broken(mask=[True] * 8)}, "have 7 of q01, 7 of q99, 8 of mask"),
        (
            {"norm_stats": broken(q01=[float("nan")] * 7)},
            "q01 in norm_stats of 'bridge_orig' is .*not a list of finite",
        ),
        ({"norm_stats": broken(q99=[1e300] * 7)}, "q99 in norm_stats"),
        ({"norm_stats": broken(mask=[1] * 7)}, "mask in norm_stats of 'bridge_orig' is .*not a list of true and false"),
        ({"norm_stats": broken(q01=[], q99=[], mask=[])}, "0 low and 0 high numbers"),
        ({"n_action_bins": 1}, "1 edges"),
        ({"pad_to_multiple_of": 40000}, "pad_to_multiple_of is 40000"),
        ({"image_sizes": [56, 70]}, "image_sizes is .56, 70."),
        ({"image_sizes": 56}, "image_sizes is 56"),
        ({"timm_model_ids": [SIGLIP, DINO]}, "timm_model_ids .* are not supported"),
        ({"timm_model_ids": [DINO]}, "timm_model_ids"),
        ({"timm_override_act_layers": [None, "quick_gelu"]}, "timm_override_act_layers"),
        ({"use_fused_vision_backbone": False}, "use_fused_vision_backbone False is not supported in an OpenVLA"),
        ({"llm_backbone_id": "phi-2-3b"}, "llm_backbone_id 'phi-2-3b' is not supported in an OpenVLA"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_config({**config_of(TINY), **changed})


def parts(value: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to every value in JSON."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (key,)
        yield from ((key, *way) for way in parts(item))


@pytest.mark.slow
def test_a_setting_of_any_kind_is_read_or_refused() -> None:
    refused = 0
    for file, written in (("config", config_of(TINY)), ("processor", processor_of(TINY))):
        for way in parts(written):
            for wrong in (None, -1, 1.5, 1 << 80, "x", [], {}, [None] * 2, True):
                changed = json.loads(json.dumps(written))
                holder = changed
                for key in way[:-1]:
                    holder = holder[key]
                holder[way[-1]] = wrong
                config, processor = (changed, processor_of(TINY)) if file == "config" else (config_of(TINY), changed)
                try:
                    FAMILY.original.processor(config, processor)
                    FAMILY.adjust(FAMILY.read(config), processor)
                except (CheckpointError, UnsupportedModelError):
                    refused += 1
    assert refused > 100


def test_a_plan_counts_the_tokens_of_the_longest_action(folder: Path, checkpoint: Path) -> None:
    assert find_size(str(folder)).action_tokens == find_size(str(checkpoint)).action_tokens == NUMBERS
    two = {**config_of(TINY), "norm_stats": {"fractal": OTHER, "bridge_orig": BRIDGE}}
    assert config_size(two, "x").action_tokens == NUMBERS
    assert config_size({**two, "norm_stats": {"fractal": OTHER}}, "x").action_tokens == 3


def test_the_sizes_of_a_plan_are_those_of_the_weights() -> None:
    published = {
        **config_of(TINY), "timm_model_ids": [*TOWERS][:2], "image_sizes": [224, 224],
        "text_config": {"model_type": "llama", "vocab_size": 32064},
    }  # fmt: skip
    known = KNOWN["openvla-7b"]
    found = config_size(published, "x")
    assert (found.decoder, found.vision, found.action_tokens) == (known.decoder, known.vision, known.action_tokens)
    assert known.parameters / 1e9 == pytest.approx(7.50, abs=0.01)  # as exported, without the last blocks and pooling
    for config, size in (
        (read_config(published), known), (read_config(config_of(TINY)), config_size(config_of(TINY), "x")),
    ):  # fmt: skip
        shapes = [shape for _, shape in (*vision_tensors(config), *config.text.tensors())]
        parts = precisions_of(size, "fp32")
        assert size.parameters == sum(map(math.prod, shapes))
        assert sum(group.count * math.prod(group.shape) for group in all_weights(size, parts)) == size.parameters
    macs = 256 * (1024 + 1152) * 3 * 14**2 + 256 * sum(a * b for a, b in ((2176, 8704), (8704, 4096), (4096, 4096)))
    for layers, hidden, ffn, tokens in ((23, 1024, 4096, 261), (26, 1152, 4304, 256)):
        macs += layers * (tokens * (4 * hidden**2 + 2 * hidden * ffn) + 2 * tokens**2 * hidden)
    assert encode_flops(known.vision, 1) == pytest.approx(2 * macs, rel=1e-6)


def test_the_configuration_comes_back_from_the_manifest(model: Model, checkpoint: Path) -> None:
    plan = plan_export(ExportOptions(str(checkpoint), KS, "fp32", dialects=ORT))
    assert config_of_manifest(model.manifest) == plan.config
    assert plan.config.vision.beside is not None
    assert plan.config.vision.beside.pixel_scale == pytest.approx([0.458, 0.448, 0.45])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image_resize_strategy": "letterbox"}, "image_resize_strategy 'letterbox' is not supported"),
        ({"interpolations": ["bilinear"] * 2}, "interpolations .*bilinear"),
        ({"input_sizes": [[3, 56, 56], [3, 70, 70]]}, "input_sizes"),
        ({"means": [[0.5] * 3]}, "means is"),
        ({"stds": [[0.5] * 3, [0.0] * 3]}, "stds is"),
        ({"stds": 3}, "stds is 3"),
    ],
)
def test_pictures_that_are_not_seen_so_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    write_json(tmp_path / "preprocessor_config.json", {**processor_of(TINY), **changed})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        open_checkpoint(str(tmp_path))


def test_statistics_that_are_not_numbers_are_refused_when_the_file_is_read(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    (tmp_path / "config.json").unlink()
    written = {**config_of(TINY), "norm_stats": broken(q01=[float("nan")] * 7)}
    write_json(tmp_path / "config.json", written)
    with pytest.raises(CheckpointError, match=r"config\.json.*NaN is not JSON"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ActionRange((0.0,), (1.0, 2.0), (True,)),
        lambda: ActionRange((float("nan"),), (1.0,), (True,)),
        lambda: ActionRange((0.0,), (1e200,), (True,)),
        lambda: ActionBins(10, 256, {"a": ActionRange((0.0,), (1.0,), (True,))}),
        lambda: ActionBins(32000, 256, {}),
    ],
)
def test_a_manifest_that_was_altered_is_refused(make: Any) -> None:
    with pytest.raises(BundleError, match="bins: "):
        make()


def test_a_tokenizer_that_makes_other_prompts_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    pieces = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").unlink()
    # the mark of a space changes places with the token before it
    from transformers.convert_slow_tokenizer import import_protobuf

    model = import_protobuf().ModelProto.FromString(pieces)
    one, other = model.pieces[EMPTY - 1], model.pieces[EMPTY]
    one.piece, other.piece = other.piece, one.piece
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=rf"OpenVLA was trained with .*{EMPTY}\]; use the tokenizer"):
        plan_export(ExportOptions(str(tmp_path), (3,), "fp32", dialects=ORT))


def test_the_command_prints_an_action_as_json(folder: Path, tmp_path: Path, model: Model) -> None:
    PICTURE.save(tmp_path / "a.png")
    arguments = ["--bundle", str(folder), "--device", "cpu", "--k", "5", "--act", "none", "--unnorm-key", "bridge_orig"]
    done = invoke("run", *arguments, str(tmp_path / "a.png"), WORDS)
    found = json.loads(done.stdout)
    np.testing.assert_allclose(found["actions"], model.act(PICTURE, WORDS, k=5), atol=1e-5)
    assert set(found["seconds"]) == {"tower", "prompt", "expert"}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.01), ("int8", 0.1)])
def test_logits_are_near_at_other_precisions(
    checkpoint: Path, judge: Judge, tmp_path: Path, precision: str, most: float
) -> None:
    bundle = export(checkpoint, tmp_path / "bundle", (3,), precision, dialects=ORT)
    with load(bundle.folder, device="cpu", threads=THREADS) as rounded:
        assert all(check.passed for check in check_golden(rounded))
        found = greedy(rounded, prompt(rounded, prompt_messages(WORDS.lower()), [PICTURE]), 3, 1).logits[0]
        wanted = judge.greedy(PICTURE, WORDS, 3, 1)[1][0].numpy()
        error = np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std()
        assert error < most
        assert np.isfinite(rounded.act(PICTURE, WORDS)).all()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.environ.get("VTX_CONFIGURATIONS", "1"))))
def test_random_configurations_answer_as_the_statement(tmp_path: Path, number: int) -> None:
    tiny, ks = drawn(number)
    statistics = tiny.norm_stats["bridge_orig"]["action"]
    patch_towers = with_towers(tiny)
    try:
        checkpoint = make_openvla(tmp_path / "checkpoint", tiny, number)
        bundle = export(checkpoint, tmp_path / "bundle", ks, dialects=ORT)
        with load(bundle.folder, device="cpu", threads=THREADS) as model:
            compare(model, Judge(checkpoint, tiny, number), number, ks, statistics, len(statistics["q01"]))
    finally:
        patch_towers.undo()
