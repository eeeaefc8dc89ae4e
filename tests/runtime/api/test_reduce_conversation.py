"""Reductions asked for by word: what an answer says of them, and what later questions reuse."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from PIL import Image

from tests.support.exported import QUESTIONS, THREADS, Models
from tests.support.tiny import Tiny, random_image
from vtx import cli
from vtx.runtime.api.answer import Stats
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import Options
from vtx.runtime.errors import BundleError, RequestError
from vtx.runtime.policies import parse
from vtx.runtime.policies.make import check_provided
from vtx.runtime.session.reduction_report import ReductionReport
from vtx.runtime.vision.tokens import NO_EXTRAS, Extras, ImageTokens

pytestmark = pytest.mark.dialects("ort", "trt")

OPTIONS = Options(max_new_tokens=6, ignore_eos=True)
TINY = Tiny(image=126, context=512)  # 9 x 9 patches, so 9 windows
PATCHES = 81
# A little below 1/81, what a row gets on average.
DUAL = "mustdrop:gamma=0.011,alpha=1,layers=2/4/6"
TAUS = np.linspace(-1, 1, 81).tolist()
IMAGE, OTHER = random_image(4), random_image(7)


class Watched:
    """A backend that counts the images it encodes."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.extras = backend, list[dict[str, list[float]]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
        self.extras.append({name: value.tolist() for name, value in extras.items()})
        found: ImageTokens = self._backend.vision(pixels, extras)
        return found


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models(TINY, (3, 5), reductions=(DUAL, "fastv:k=3"))


@pytest.fixture(scope="module")
def tau(model: Model) -> float:
    """A threshold at which three of nine windows of IMAGE merge."""
    pixels = model.loaded.images.prepare(IMAGE).pixels[None]
    merged = {tau: model.backend.vision(pixels, {"tau": np.float32([tau])}).patches.merged.sum() for tau in TAUS}
    return next(tau for tau, count in merged.items() if count == 3)


def reduced(stats: Stats) -> ReductionReport:
    assert stats.reduced is not None
    return stats.reduced


# --- what an answer says --------------------------------------------------------------------------


def test_the_bundles_first_reduction_is_the_default(model: Model) -> None:
    assert model.manifest.reductions[0].startswith("mustdrop:gamma=0.011,")
    with model.open(IMAGE) as image:
        first, named = image.ask(QUESTIONS[0], None, OPTIONS), image.ask(QUESTIONS[0], None, OPTIONS, reduce=DUAL)
        none = image.ask(QUESTIONS[0], None, OPTIONS, reduce="none")
    assert first.token_ids == named.token_ids
    assert first.stats.reduce == model.manifest.reductions[0]
    assert (none.stats.reduce, none.stats.reduced) == ("none", None)
    assert none.stats.vision_tokens_kept == (PATCHES,) * 8


def test_an_answer_says_what_each_cut_kept(model: Model, tau: float) -> None:
    with model.open(IMAGE) as image:
        stats = image.ask(QUESTIONS[0], None, OPTIONS, reduce=f"{DUAL},tau={tau}").stats
    found = reduced(stats)
    merged = len(found.merged[0])
    assert merged == 3
    assert stats.vision_tokens == PATCHES - 8 * merged
    assert stats.prompt_tokens == stats.kv_slots[0]
    assert len(found.keys[0]) == -(-8 * stats.vision_tokens // 100)
    assert [kept.layer for kept in found.kept] == [1, 3, 5, 7]
    assert [kept.by for kept in found.kept] == ["mustdrop"] * 4
    sizes = [len(kept.patches[0]) for kept in found.kept]
    assert sizes[0] == stats.vision_tokens
    assert list(stats.vision_tokens_kept) == [size for size in sizes for _ in range(2)]
    # Two layers each, the second of which is where the next prune is counted.
    assert found.vision_tokens_mean == pytest.approx((sum(sizes) + sum(sizes[1:]) + sizes[-1]) / 8, abs=0.01)
    for earlier, later in zip(found.kept, found.kept[1:], strict=False):
        assert set(later.patches[0]) < set(earlier.patches[0])
        assert set(found.keys[0]) <= set(later.patches[0])
    text = stats.prompt_tokens - stats.vision_tokens
    assert stats.kv_slots == (stats.prompt_tokens, *[text + sizes[-1]] * 7)
    assert stats.kv_bytes == sum(stats.kv_slots) * model.manifest.kv_slot_bytes()
    assert found.notes == ()


def test_two_images_have_merging_keys_and_survivors_of_their_own(model: Model, tau: float) -> None:
    word = f"{DUAL},tau={tau}"
    with model.open([IMAGE, OTHER]) as both, model.open(IMAGE) as one, model.open(OTHER) as other:
        stats = [talk.ask(QUESTIONS[1], None, OPTIONS, reduce=word).stats for talk in (both, one, other)]
    found = [reduced(s) for s in stats]
    assert found[0].merged == (*found[1].merged, *found[2].merged)
    assert found[0].keys == (*found[1].keys, *found[2].keys)
    assert stats[0].vision_tokens == stats[1].vision_tokens + stats[2].vision_tokens
    assert all(len(kept.patches) == 2 for kept in found[0].kept)


@pytest.mark.parametrize("word", [DUAL, "lsm", "cls", "fastv:k=3"])
def test_without_an_image_there_is_nothing_to_leave_out_and_the_answer_says_so(model: Model, word: str) -> None:
    with model.open() as talk:
        answer = talk.ask(QUESTIONS[0], 5, OPTIONS, reduce=word)
        plain = talk.ask(QUESTIONS[0], 5, OPTIONS, reduce="none")
    assert answer.token_ids == plain.token_ids
    name = word.partition(":")[0]
    assert reduced(answer.stats).notes == (f"the prompt has no image: {name} had nothing to leave out",)
    assert reduced(answer.stats).vision_tokens_mean == 0


def test_cuts_at_and_past_a_withdrawal_have_nothing_to_leave_out_and_the_answer_says_so(model: Model) -> None:
    with model.open(IMAGE) as image:
        dual = image.ask(QUESTIONS[1], 5, OPTIONS, reduce=f"{DUAL},tau=off").stats
        fastv = image.ask(QUESTIONS[1], 3, OPTIONS, reduce="fastv:k=3").stats
        plain = image.ask(QUESTIONS[1], 3, OPTIONS, reduce="none").stats
    assert reduced(dual).notes == ("the image left before layer 5: mustdrop had nothing to leave out before 5, 7",)
    assert reduced(fastv).notes == ("the image left before layer 3: fastv had nothing to leave out before 4",)
    assert fastv.kv_slots == plain.kv_slots
    assert [kept.by for kept in reduced(dual).kept] == ["", "mustdrop", "withdrawal"]


def test_the_json_object_is_flat_and_whole(model: Model) -> None:
    with model.open(IMAGE) as image:
        found = image.ask(QUESTIONS[0], None, OPTIONS).to_dict()
        plain = image.ask(QUESTIONS[0], None, OPTIONS, reduce=None).to_dict()
    assert set(found) - set(plain) == {"kept", "merged", "keys", "vision_tokens_mean", "notes"}
    assert "reduced" not in found
    assert set(found["kept"][0]) == {"layer", "by", "patches"}
    json.dumps(found)


# --- what later questions reuse -------------------------------------------------------------------


def test_the_tower_runs_once_for_each_threshold(model: Model, tau: float) -> None:
    watched = Watched(model.backend)
    words = [
        f"{DUAL},tau={tau}",
        f"{DUAL},tau={tau},key=0.2",
        f"mustdrop:gamma=0.011,alpha=0.01,layers=2/4,tau={tau}",
        "fastv:k=3",
    ]
    words += [f"lsm:tau={tau},order=merged-first", f"lsm:tau={tau}+cls", "cls:keep=0.5", "none", words[0]]
    with Model(model.bundle, watched, 0.0).open(IMAGE) as image:
        for word in words:
            image.ask(QUESTIONS[0], None, OPTIONS, reduce=word)
    assert watched.extras == [{"tau": [np.float32(tau)]}, {}]


def test_a_change_of_run_options_reuses_the_image(model: Model) -> None:
    with model.open(IMAGE) as image:
        ways = [DUAL, f"{DUAL},positions=renumber", f"{DUAL},key=0", "mustdrop:gamma=0.011,alpha=0.01,layers=2/4/6"]
        stats = [image.ask(QUESTIONS[0], k, OPTIONS, reduce=word).stats for word in ways for k in (None, 5)]
    assert [s.reused_image for s in stats] == [False] + [True] * 7


@pytest.mark.slow
def test_hundreds_of_questions_leave_memory_flat(model: Model, tau: float) -> None:
    """A leak grows in each third; what other threads of the process free or take meanwhile does not."""
    process, resident = psutil.Process(), []
    words = [f"{DUAL},tau={tau}", "none", "fastv:k=3", "cls"]
    with model.open(IMAGE) as image:
        for number in range(241):
            image.ask(QUESTIONS[number % 3], (None, 5)[number % 2], OPTIONS, reduce=words[number // 3 % 4])
            if number % 60 == 0 and number:
                gc.collect()
                resident.append(process.memory_info().rss)
    assert min(later - before for before, later in pairwise(resident)) < (4 << 20) // 3


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("word", "lacks"),
    [
        ("fastv:k=3", "a cut before layer 4"),
        ("mustdrop:layers=2/4", "a cut before layer 2"),
        ("mustdrop:layers=1", "a cut before layer 2"),
        ("lsm", "a vision graph that merges windows"),
        ("cls", "the class token's attention"),
    ],
)
def test_a_bundle_without_the_graphs_says_how_to_export_them(models: Models, word: str, lacks: str) -> None:
    plain = models(TINY, (3, 5))
    with plain.open(IMAGE) as image, pytest.raises(RequestError) as caught:
        image.ask(QUESTIONS[0], reduce=word)
    said = str(caught.value)
    assert f"lacks {lacks}" in said
    assert f"vtx-export --reduce {word.partition(':')[0]}" in said
    assert "\n" not in said


def test_the_graphs_that_will_run_are_asked_for_what_they_have(model: Model) -> None:
    graphs = dict(model.manifest.dialects)
    graphs["trt"] = replace(graphs["trt"], vision_merges=False)
    manifest = replace(model.manifest, dialects=graphs)
    for word in (DUAL, "lsm"):
        check_provided(parse(word), manifest, "ort")
        with pytest.raises(RequestError, match="lacks a vision graph that merges windows"):
            check_provided(parse(word), manifest, "trt")


def test_a_cut_past_the_last_layer_is_refused(model: Model) -> None:
    with model.open(IMAGE) as image, pytest.raises(RequestError, match="fastv drops tokens after layer 8"):
        image.ask(QUESTIONS[0], reduce="fastv:k=8")


def test_a_class_attention_of_nan_is_an_error(model: Model) -> None:
    class Broken(Watched):
        def vision(self, pixels: NDArray[np.float32], extras: Extras = NO_EXTRAS) -> ImageTokens:
            found = super().vision(pixels, extras)
            found.patches.signals["cls_attention"][3] = np.nan
            return found

    with (
        Model(model.bundle, Broken(model.backend), 0.0).open(IMAGE) as image,
        pytest.raises(BundleError, match="what the tower says of an image is not a number"),
    ):
        image.ask(QUESTIONS[0], reduce="cls")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    IMAGE.save(path)
    return path


def run(model: Model, *words: object) -> Result:
    line = ["--bundle", model.bundle.folder, "--threads", THREADS, "--max-new-tokens", 3, *words]
    return CliRunner().invoke(cli.run, [str(word) for word in line], catch_exceptions=False)


def test_the_command_takes_a_word_and_prints_what_it_kept(model: Model, picture: Path) -> None:
    done = run(model, picture, *QUESTIONS[:2], "--k", "none", "--reduce", "fastv:k=3", "--json")
    assert done.exit_code == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["reduce"] for f in found] == ["fastv:k=3,ratio=0.5"] * 2
    assert [len(f["kept"][-1]["patches"][0]) for f in found] == [41, 41]


def test_the_command_tells_on_stderr_what_was_off(model: Model) -> None:
    done = run(model, "--text-only", QUESTIONS[0], "--reduce", "fastv:k=3")
    assert done.exit_code == 0
    assert "the prompt has no image: fastv had nothing to leave out" in done.stderr
    assert "fastv" not in done.stdout


@pytest.mark.parametrize("word", ["tome", "fastv:k=x", "mustdrop:tau=7", "fastv+cls"])
def test_the_command_refuses_a_bad_word_in_one_line(model: Model, picture: Path, word: str) -> None:
    done = run(model, picture, QUESTIONS[0], "--reduce", word)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def lit(panel: NDArray[np.uint8], image: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of 9 x 9 patches of a panel are as bright as the image, judged in their middles."""
    step = len(panel) / 9
    at = ((np.arange(9) + 0.7) * step).astype(int)
    there, wanted = panel[at][:, at].astype(float), image[(at * 126 / len(panel)).astype(int)]
    wanted = wanted[:, (at * 126 / len(panel)).astype(int)]
    found: NDArray[np.bool_] = np.abs(there - wanted).max(-1) < 2
    return found


def panel(sheet: NDArray[np.uint8], row: int, column: int) -> NDArray[np.uint8]:
    """Panels are 378 pixels a side, a margin of 12 apart, under a question and a caption of 62 pixels in all."""
    top, left = 12 + row * (62 + 378 + 12) + 62, 12 + column * (378 + 12)
    return sheet[top : top + 378, left : left + 378]


def test_the_picture_shows_what_survives_each_cut(model: Model, picture: Path, tmp_path: Path, tau: float) -> None:
    out = tmp_path / "tokens.png"
    line = [picture, *QUESTIONS[:2], "--k", "none", "--reduce", f"{DUAL},tau={tau}", "--show-tokens", out, "--json"]
    done = run(model, *line)
    assert done.exit_code == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    sheet = np.asarray(Image.open(out).convert("RGB"))
    values = model.loaded.images.prepare(IMAGE).pixels.transpose(1, 2, 0)
    settings = model.manifest.image
    pixels = ((values * settings.std + settings.mean) / settings.rescale).clip(0, 255)
    for row, answer in enumerate(found):
        assert lit(panel(sheet, row, 0), pixels).all(), "the image itself comes first"
        whole = len(answer["kept"][0]["patches"][0]) == 81  # then it is the panel of the tokens that enter, too
        for column, kept in enumerate(answer["kept"]):
            alive = np.zeros((9, 9), bool)
            for place in kept["patches"][0]:
                reach = 3 if place in answer["merged"][0] else 1
                alive[place // 9 : place // 9 + reach, place % 9 : place % 9 + reach] = True
            dark = pixels.max() < 10
            assert not dark
            assert (lit(panel(sheet, row, column + (not whole)), pixels) == alive).mean() > 0.9
    assert (sheet[-42:] != 255).any(), "the legend is below"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--text-only", "who?"), "there is no image"),
        (("IMAGE", "red?", "--reduce", "none"), "without a reduction or a rest; add --reduce"),
    ],
)
def test_a_picture_of_nothing_is_refused_before_anything_runs(
    model: Model, picture: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    named = [picture if word == "IMAGE" else word for word in words]
    done = run(model, *named, "--show-tokens", tmp_path / "out.png")
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr
    assert not (tmp_path / "out.png").exists()


def test_a_picture_that_cannot_be_written_is_an_error_of_one_line(model: Model, picture: Path, tmp_path: Path) -> None:
    done = run(model, picture, "red?", "--show-tokens", tmp_path / "no" / "out.png", "--json")
    assert done.exit_code == 1
    assert f"cannot write {tmp_path / 'no' / 'out.png'}: {tmp_path / 'no'} is not a directory" in done.stderr
    assert done.stderr.count("\n") == 1
