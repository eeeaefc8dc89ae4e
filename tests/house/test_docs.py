"""What the pages say about the repository is true of it: files they name exist, links lead somewhere."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from vtx import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("benchmarks/**/*.md")]
)
NAMED = re.compile(r"`((?:commands|exporter|tools|runtime|profiles|tests|benchmarks|demo|examples)/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
HISTORY = ROOT / "CHANGELOG.md"  # names files as they were called then


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    if page != HISTORY:
        missing = [name for name in NAMED.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()]
        assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not re.match(r"[a-z]+:", link)]
    assert not [link for link in links if not (page.parent / link).exists()]


PROSE = 2500  # words of a page, tables and code aside


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_read_in_one_go(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert len(" ".join(line for line in text.splitlines() if not line.startswith("|")).split()) <= PROSE


GENERATED = {"api.md", "api-actions.md", "api-answers.md", "commands.md", "commands-models.md", "commands-measuring.md",
             "cpp.md", "endpoints.md", "limits.md", "models.md"}  # fmt: skip


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/how-to/*.md")), ids=lambda page: page.stem)
def test_a_how_to_page_has_one_task(page: Path) -> None:
    assert words(page) <= 900


def test_the_pages_that_people_write_stay_few() -> None:
    written = [page for page in ROOT.glob("docs/**/*.md") if page.name not in GENERATED]
    assert len(written) < len([*ROOT.glob("docs/**/*.md")]) - 8
    assert sum(map(words, written)) <= 45_000
    assert words(ROOT / "docs/measurements/index.md") <= 1500
    assert words(ROOT / "CONTRIBUTING.md") <= 1500


def test_the_way_through_the_pages_leads_to_every_task() -> None:
    linked = set(LINK.findall((ROOT / "docs/which-way.md").read_text(encoding="utf-8")))
    assert {f"how-to/{page.name}" for page in ROOT.glob("docs/how-to/*.md")} <= linked


@pytest.mark.parametrize("script", [
    "reference/api.py", "reference/commands.py", "reference/cpp.py", "reference/endpoints.py", "measurements/tables.py",
])  # fmt: skip
def test_generated_pages_are_as_the_code_and_the_results_are(script: str) -> None:
    for path, text in runpy.run_path(str(ROOT / "docs" / script))["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"run: python docs/{script}"


HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What a link may say after its # to lead to a heading of a page, as GitHub and the site's builder name them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower() for heading in HEADING.findall(text))
    return {re.sub(r"[^\w -]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_headings(page: Path) -> None:
    found = [link for link in ANCHOR.findall(page.read_text(encoding="utf-8")) if not re.match(r"[a-z]+:", link[0])]
    assert not [(file, at) for file, at in found if at not in anchors(page.parent / file if file else page)]


def test_every_page_is_in_the_site_s_navigation_and_on_its_first_page() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert (
        set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)) == pages
    )
    first = LINK.findall((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    assert pages - {"index.md"} <= set(first)


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENDS = {"|", "&&", ">", ";"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every vtx command in the code blocks of a page, without what a shell does around them."""
    for block in (block for language, block in BLOCK.findall(text) if language in ("", "sh", "bash", "console")):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a table or a sketch, not a command
                continue
            names = [Path(word).name.removeprefix("vtx-") for word in words]
            starts = [n for n, word in enumerate(words) if "vtx-" in word and names[n] in cli.main.commands]
            if starts:
                rest = words[starts[0] + 1 :]
                ends = [n for n, word in enumerate(rest) if word in ENDS]
                yield [names[starts[0]], *(rest[: ends[0]] if ends else rest)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_have_options_that_exist(page: Path) -> None:
    if page == HISTORY:
        return
    for name, *words in commands(page.read_text(encoding="utf-8")):
        command = cli.main.commands[name]
        try:
            command.make_context(f"vtx-{name}", list(words))
        except click.exceptions.Exit:  # --help and --version
            continue
        except click.UsageError as e:
            pytest.fail(f"vtx-{name} {' '.join(words)}: {e.format_message()}")


@pytest.mark.parametrize("name", sorted(cli.main.commands))
def test_the_examples_of_a_command_s_help_have_options_that_exist(name: str) -> None:
    examples = cli.main.commands[name].epilog or ""
    found = list(commands(f"```\n{examples}\n```"))
    assert found
    for called, *words in found:
        cli.main.commands[called].make_context(f"vtx-{called}", list(words))


def test_the_search_for_commands_finds_them() -> None:
    text = "```sh\ncat a.jpg | ~/vtx/bin/vtx-run - 'what?' --k 8 > out  # told\n```"
    assert list(commands(text)) == [["run", "-", "what?", "--k", "8"]]
    assert len(list(commands((ROOT / "README.md").read_text(encoding="utf-8")))) > 6
