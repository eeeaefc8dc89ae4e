"""The page in a real browser: a picture, a question, two settings side by side, on a desktop and on a phone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.bundles import export
from tests.support.serving import WAIT, Served, serving, until
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def roomy(packages: None, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A bundle with room for several answers, as the page asks for them."""
    folder = tmp_path_factory.mktemp("roomy") / "tiny"
    return export(
        tiny_checkpoint(Tiny(context=1024)), folder, (3, 5), "fp32", reductions=("fastv:k=3,ratio=0.5",)
    ).folder


@pytest.fixture(scope="module")
def served(roomy: Path) -> Iterator[Served]:
    with serving({"tiny": roomy}) as served:
        yield served


@pytest.fixture(scope="module")
def local(roomy: Path) -> Iterator[Model]:
    with load(roomy, device="cpu", threads=1) as model:
        yield model


def test_the_page_takes_nothing_from_elsewhere(served: Served) -> None:
    page = served.request("GET", "/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    for path in ("/", "/page.js", "/page.css", "/charts.js"):
        content = served.request("GET", path).body.decode()
        assert content.strip()
        assert "http://" not in content.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in content


def test_the_page_is_there_without_a_key_and_its_figures_are_not(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["secret"]) as served:
        assert served.request("GET", "/").status == 200
        assert served.request("GET", "/v1/models").status == 401


def missing(what: str) -> NoReturn:
    """Skip, or fail where the browser was asked for."""
    (pytest.fail if "VTX_REQUIRE_BROWSER" in os.environ else pytest.skip)(f"needs {what}: make test-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright import sync_api as playwright
    except ModuleNotFoundError:
        missing("the playwright package")
    if BROWSER is None:
        missing("Chromium")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        launched = started.chromium.launch(executable_path=BROWSER, args=arguments)
        yield launched
        launched.close()


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def page(browser: Any, served: Served, request: Any) -> Iterator[Any]:
    """The page, with the model known; whatever the browser complains about fails the test."""
    width, height = request.param
    context = browser.new_context(viewport={"width": width, "height": height})
    context.set_default_timeout(1000 * WAIT)
    opened, complaints = context.new_page(), list[str]()
    opened.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(f"http://127.0.0.1:{served.port}/")
    opened.wait_for_selector("#model option", state="attached")
    yield opened
    assert not [complaint for complaint in complaints if "status of 400" not in complaint], "but for what is refused"
    assert opened.evaluate("document.documentElement.scrollWidth") <= width, "nothing stands out at the side"
    context.close()


def choose(page: Any, pane: int, depth: int, reduce: str) -> None:
    """Set a pane's slider to its `depth`-th K, and its reductions."""
    page.locator(f"#setting-{pane} input[type=range]").fill(str(depth))
    page.locator(f"#setting-{pane} input[type=text]").fill(reduce)


def test_two_settings_answer_side_by_side(page: Any, local: Model, tmp_path: Path) -> None:
    random_image(1).save(tmp_path / "image.png")
    page.locator("#file").set_input_files(str(tmp_path / "image.png"))
    page.wait_for_selector("#preview:not([hidden])")
    page.locator("#compare").check()
    choose(page, 0, 2, "none")
    choose(page, 1, 0, "fastv:k=3,ratio=0.5")
    assert page.locator("#setting-0 output").inner_text() == "3"
    page.locator("#question").fill("red?")
    page.locator("#question").press("Control+Enter")
    page.wait_for_selector("#pane-1 .cuts")
    image = local.open(tmp_path / "image.png")
    for pane, k, reduce in ((0, 3, "none"), (1, None, "fastv:k=3,ratio=0.5")):
        shown = page.locator(f"#pane-{pane} .text").evaluate("node => node.textContent")
        assert shown == image.ask("red?", k, reduce=reduce).text
        assert page.locator(f"#pane-{pane} svg rect").count() == 8, "a bar a layer"
    captions = [page.locator(f"#pane-{pane} figcaption").all_inner_texts() for pane in (0, 1)]
    assert captions[0] == ["16 image tokens enter", "0 image tokens enter layer 3 (withdrawal)"]
    assert captions[1] == ["16 image tokens enter", "8 image tokens enter layer 4 (fastv)"]
    page.locator("#question").fill("how many?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-1 .turn:nth-of-type(2) dl")
    assert page.locator("#pane-0 .turn h2").all_inner_texts() == ["red?", "how many?"]
    firsts = [page.locator(f"#pane-{pane} dd").all_inner_texts() for pane in (0, 1)]
    assert all(not any("cached" in shown for shown in pane) for pane in firsts), "each is computed from scratch"


def test_an_answer_in_a_form_is_shown_parsed(page: Any, served: Served) -> None:
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    page.locator("summary").click()
    page.locator("#example-choices").click()
    page.locator("#question").fill("red?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-0 .turn:nth-of-type(1) dl + dl")
    first = page.locator("#pane-0 .turn:nth-of-type(1) dl").first
    assert first.locator("dt").all_inner_texts() == ["yes", "no", "unsure"]
    assert sum(float(odds.rstrip("%")) for odds in first.locator("dd").all_inner_texts()) == pytest.approx(100, abs=0.2)
    page.locator("#example-object").click()
    page.locator("#question").fill("which?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-0 .turn:nth-of-type(2) dl")
    turn = page.locator("#pane-0 .turn:nth-of-type(2)")
    answer = json.loads(turn.locator(".text").inner_text())
    assert turn.locator("dl").first.locator("dd").all_inner_texts() == [answer["shape"], str(answer["count"])]
    page.locator("#answer-form").fill("{")
    page.locator("#question").fill("which?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-0 .turn:nth-of-type(3) .wrong")
    assert "is not JSON" in page.locator("#pane-0 .turn:nth-of-type(3) .wrong").inner_text()


def test_comments_in_a_stream_are_passed_over(page: Any) -> None:
    chunk = '{"choices": [{"index": 0, "delta": {"content": "red"}, "finish_reason": null}]}'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=200, content_type="text/event-stream", body=f": computing\n\ndata: {chunk}\n\ndata: [DONE]\n\n"
    ))  # fmt: skip
    page.locator("#question").fill("red?")
    page.locator("#ask").click()
    page.wait_for_selector("#ask:not([disabled])")
    assert page.locator("#pane-0 .text").inner_text() == "red"


def test_the_camera_gives_a_picture(page: Any) -> None:
    page.locator("#camera").click()
    page.wait_for_selector("#video:not([hidden])")
    until(lambda: page.locator("#video").evaluate("video => video.videoWidth") > 0, "the camera gives frames")
    page.locator("#camera").click()
    page.wait_for_selector("#preview:not([hidden])")
    assert page.locator("#video").is_hidden()


def test_escape_stops_an_answer(page: Any) -> None:
    page.evaluate(
        "void (window.fetch = (path, options) => new Promise("
        "(_, refuse) => { options.signal.onabort = () => refuse(options.signal.reason); }))"
    )
    page.locator("#question").fill("red?")
    page.locator("#ask").click()
    page.wait_for_selector("#stop:not([disabled])")
    page.keyboard.press("Escape")
    page.wait_for_selector("#pane-0 .wrong")
    assert "stopped" in page.locator("#pane-0 .wrong").inner_text()
    assert page.locator("#ask").is_enabled()


def test_what_the_server_refuses_is_shown(page: Any) -> None:
    choose(page, 0, 0, "nothing-such")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=400, content_type="application/json", body='{"error": {"message": "no such reduction <b>"}}'
    ))  # fmt: skip
    page.locator("#question").fill("red?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-0 .wrong")
    assert page.locator("#pane-0 .wrong").inner_text() == "no such reduction <b>"
