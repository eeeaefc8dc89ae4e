"""vtx-chat: turns at a prompt, and what can be changed between them."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import vtx
from tests.support import bundles
from tests.support.calling import THINKING, calling_bundle
from tests.support.families.internvl import INTERNVL
from tests.support.fixtures import Checkpoints
from tests.support.tiny import random_image
from vtx import cli

OPTIONS = vtx.Options(max_new_tokens=4)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / "one.png", folder / "two.png"]
    for seed, path in enumerate(paths):
        random_image(seed).save(path)
    return list(map(str, paths))


def typed(bundle: Path, image: str, *lines: str) -> Result:
    words = [image, "--bundle", str(bundle), "--device", "cpu", "--max-new-tokens", "4"]
    done = CliRunner().invoke(cli.chat, words, input="\n".join(lines) + "\n", catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done


def test_turns_build_on_each_other_as_in_a_chat(bundle: Path, images: list[str]) -> None:
    chat = vtx.load(bundle, device="cpu").open(images[0]).chat()
    wanted = [chat.ask(question, OPTIONS).text for question in ("red?", "and blue?")]
    assert typed(bundle, images[0], "red?", "and blue?").stdout == "".join(f"{text}\n" for text in wanted)


def test_a_wrong_number_of_tokens_is_told_before_a_bundle_is_loaded(images: list[str]) -> None:
    done = CliRunner().invoke(cli.chat, [images[0], "--bundle", "none", "--max-new-tokens", "0"])
    assert done.exit_code == 1
    assert "max_new_tokens is 0" in done.stderr


def test_another_image_and_another_k_begin_anew(bundle: Path, images: list[str]) -> None:
    model = vtx.load(bundle, device="cpu")
    first = model.open(images[0]).chat().ask("red?", OPTIONS).text
    second = model.open(images[1]).chat().ask("red?", OPTIONS).text
    third = model.open(images[1]).chat(None).ask("red?", OPTIONS).text
    done = typed(bundle, images[0], "red?", f"/image {images[1]}", "red?", "/k none", "red?", "/quit", "never asked")
    assert done.stdout == f"{first}\n{second}\n{third}\n"


def test_a_rest_begins_anew_and_each_turn_chooses_it(bundle: Path, images: list[str]) -> None:
    model = vtx.load(bundle, device="cpu")
    chats = [(None, ["red?"]), ("40%", ["red?", "and blue?"]), (None, ["red?"])]
    wanted = list[str]()
    for rest, questions in chats:
        chat = model.open(images[0]).chat()
        wanted += [chat.ask(question, OPTIONS, rest=rest).text for question in questions]
    done = typed(bundle, images[0], "red?", "/rest 40%", "red?", "and blue?", "/stats", "/rest none", "red?")
    assert done.stdout == "".join(f"{text}\n" for text in wanted)
    assert "with a rest of 7," in done.stderr


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/k 7", "K = 7"),
        ("/k many", "is not a number"),
        ("/reduce nothing", "nothing"),
        ("/rest 110%", "at most 100%"),
        ("/image nowhere.png", "nowhere.png"),
        ("/thinking on", "no switch for thoughts"),
        ("/thinking 1", "/thinking is followed by on, off or nothing"),
        ("/dance", "there is no /dance"),
        ("/stats", "no question was answered yet"),
        ("/", "/reduce SPEC"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_chat_goes_on(
    bundle: Path, images: list[str], line: str, message: str
) -> None:
    done = typed(bundle, images[0], line, "red?")
    assert message in done.stderr
    assert done.stdout == typed(bundle, images[0], "red?").stdout


def test_an_image_that_is_not_there_is_told_before_a_bundle_is_looked_for(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.chat, [str(tmp_path / "no.png"), "--bundle", str(tmp_path / "no bundle")])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no.png' does not exist" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--k", "7", "K = 7"), ("--k", "auto", "needs gates"), ("--reduce", "fastv:k=3", "not exported for fastv")],
)
def test_what_the_bundle_lacks_is_refused_before_the_first_question(
    bundle: Path, images: list[str], option: str, value: str, message: str
) -> None:
    words = [images[0], "--bundle", str(bundle), "--device", "cpu", option, value]
    done = CliRunner().invoke(cli.chat, words, input="red?\n")
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
    assert "/help lists commands" not in done.stderr


def test_a_wrong_spec_is_told_before_a_bundle_is_looked_for(images: list[str]) -> None:
    done = CliRunner().invoke(cli.chat, [images[0], "--bundle", "absent", "--reduce", "nothing"])
    assert done.exit_code == 1
    assert "nothing" in done.stderr
    assert "absent" not in done.stderr


@pytest.mark.parametrize("command", [cli.chat, cli.bench])
def test_tiles_are_refused_where_the_bundles_images_have_none(bundle: Path, command: click.Command) -> None:
    done = CliRunner().invoke(command, ["--bundle", str(bundle), "--max-tiles", "2"])
    assert done.exit_code == 1
    assert "max_tiles has no effect here" in done.output


@pytest.mark.slow
def test_an_image_has_a_limit_of_tokens(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = bundles.export(tiny_checkpoint(INTERNVL), tmp_path / "bundle").folder
    image = tmp_path / "wide.png"
    random_image(1, (160, 60)).save(image)
    words = [str(image), "--bundle", str(folder), "--device", "cpu", "--image-tokens", "16"]
    done = CliRunner().invoke(cli.chat, words, input="red?\n/stats\n", catch_exceptions=False)
    model = vtx.load(folder, device="cpu")
    counts = [model.open(image, image_tokens=tokens).ask("red?").stats.vision_tokens for tokens in (16, None)]
    assert counts[0] < counts[1]
    assert f"({counts[0]} of images)" in done.stderr


@pytest.mark.slow
def test_thoughts_are_switched_between_turns_and_shown_apart(tmp_path: Path, images: list[str]) -> None:
    folder = calling_bundle(tmp_path, THINKING)
    with vtx.load(folder, device="cpu") as model:
        plain = model.open(images[0]).chat().ask("red?", OPTIONS, thinking=False).text
        thinking = model.open(images[0]).chat().ask("red?", OPTIONS, thinking=True, max_thinking_tokens=2)
    words = [images[0], "--bundle", str(folder), "--device", "cpu", "--max-new-tokens", "4", "--no-thinking"]
    done = CliRunner().invoke(cli.chat, [*words, "--max-thinking-tokens", "2"], input="red?\n/thinking on\nred?\n")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{plain}\n{thinking.text}\n"
    assert thinking.thought
    assert f"thought: {thinking.thought}" in done.stderr
