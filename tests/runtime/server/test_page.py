"""The page in a real browser: a picture, a question, two settings side by side, on a desktop and on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import launched
from tests.support.bundles import export
from tests.support.fixtures import Checkpoints
from tests.support.serving import WAIT, Served, serving, until
from tests.support.tiny import Tiny, random_image
from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def roomy(packages: None, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoints) -> Path:
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
    for path in ("/", "/page.js", "/page.css", "/charts.js", "/history.js"):
        content = served.request("GET", path).body.decode()
        assert content.strip()
        assert "http://" not in content.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in content


def test_the_page_is_there_without_a_key_and_its_figures_are_not(tiny_bundle: Path) -> None:
    with serving({"tiny": tiny_bundle}, api_keys=["secret"]) as served:
        assert served.request("GET", "/").status == 200
        assert served.request("GET", "/v1/models").status == 401


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


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
    menu = page.locator(f"#setting-{pane} select")
    known = reduce in menu.locator("option").evaluate_all("options => options.map(option => option.value)")
    menu.select_option(reduce if known else "another spec")
    if not known:
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
    page.locator("#question").press("Enter")
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
    assert page.locator(".cuts").count() == 4, "patches are shown at every turn"


def test_on_a_phone_an_answer_stands_above_the_form(page: Any) -> None:
    form, answers = page.evaluate(
        "['#input', '#answers'].map(part => document.querySelector(part).getBoundingClientRect().top)"
    )
    phone = page.viewport_size["width"] == PHONE[0]
    assert (answers < form) == phone
    assert page.locator("#pane-0").is_visible() != phone, "an empty panel takes no room"


def test_an_answer_in_a_form_is_shown_parsed(page: Any, served: Served) -> None:
    pytest.importorskip("llguidance", reason="needs vtx-edge[guided]")
    page.locator("#guiding summary").click()
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
    page.locator("#snap").click()
    page.wait_for_selector("#preview canvas")
    assert page.locator("#video").is_hidden()


def test_a_live_camera_is_asked_about_frame_after_frame_until_it_is_stopped(page: Any) -> None:
    page.locator("#camera").click()
    page.wait_for_selector("#video:not([hidden])")
    until(lambda: page.locator("#video").evaluate("video => video.videoWidth") > 0, "the camera gives frames")
    page.locator("#question").fill("red?")
    page.locator("#question").press("Enter")
    until(lambda: "frame 3" in page.locator("#pane-0").inner_text(), "three frames were answered")
    assert page.locator("#pane-0 .turn").count() == 1, "the newest answer replaces the one before"
    assert page.locator("#pane-0 .cuts").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector("#ask:not([disabled])")
    page.locator("#camera").click()
    assert page.locator("#preview canvas").count() == 0


def test_several_pictures_are_one_question_and_a_further_one_goes_with_the_next(
    page: Any, local: Model, tmp_path: Path
) -> None:
    pictures = []
    for number in (1, 2, 3):
        pictures.append(tmp_path / f"{number}.png")
        random_image(number).save(pictures[-1])
    choose(page, 0, 0, "none")
    page.locator("#file").set_input_files([str(picture) for picture in pictures[:2]])
    until(lambda: page.locator("#preview canvas").count() == 2, "both pictures are shown")
    page.locator("#question").fill("red?")
    page.locator("#question").press("Enter")
    page.wait_for_selector("#pane-0 .turn:nth-of-type(1) dl")
    assert page.locator("#pane-0 .cuts").count() == 2, "the patches of each picture"
    page.locator("#file").set_input_files(str(pictures[2]))
    until(lambda: page.locator("#preview canvas").count() == 3, "and the third")
    page.locator("#question").fill("how many?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-0 .turn:nth-of-type(2) dl")
    parts = [{"type": "image", "image": str(picture)} for picture in pictures]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [*parts[:2], {"type": "text", "text": "red?"}]}
    ]  # fmt: skip
    shown = page.locator(".text").evaluate_all("nodes => nodes.map(node => node.textContent)")
    assert shown[0] == local.generate(turns, None, reduce="none").text
    turns += [
        {"role": "assistant", "content": shown[0]},
        {"role": "user", "content": [parts[2], {"type": "text", "text": "how many?"}]},
    ]
    assert shown[1] == local.generate(turns, None, reduce="none").text
    page.locator("#preview button").first.click()
    assert page.locator(".turn").count() == 0, "a chat about a picture ends with it"
    assert page.locator("#preview canvas").count() == 2


def test_a_reload_keeps_the_chat_its_pictures_and_its_settings(page: Any, local: Model, tmp_path: Path) -> None:
    random_image(1).save(tmp_path / "image.png")
    page.locator("#file").set_input_files(str(tmp_path / "image.png"))
    page.wait_for_selector("#preview canvas")
    choose(page, 0, 1, "fastv:k=3,ratio=0.5")
    page.locator("summary", has_text="Sampling").click()
    page.locator("#max_tokens").fill("3")
    page.locator("#temperature").fill("0.7")
    page.locator("#seed").fill("5")
    page.locator("#question").fill("red?")
    page.locator("#question").press("Shift+Enter")
    assert page.locator("#question").input_value() == "red?\n", "Shift+Enter begins a line"
    page.locator("#question").press("Enter")
    page.wait_for_selector("#pane-0 dl")
    until(lambda: page.locator("#question").input_value() == "", "the answer is complete")
    page.wait_for_selector("#ask:not([disabled])")
    before = page.locator("#pane-0").inner_html()
    page.reload()
    page.wait_for_selector("#pane-0 .cuts")
    assert page.locator("#pane-0").inner_html() == before
    fields = {name: page.locator(f"#{name}").input_value() for name in ("max_tokens", "temperature", "seed", "top_p")}
    assert fields == {"max_tokens": "3", "temperature": "0.7", "seed": "5", "top_p": ""}
    assert page.locator("#setting-0 select").input_value() == "fastv:k=3,ratio=0.5"
    assert "attends to least" in page.locator("#setting-0 .note").inner_text(), "the legend of the reduction"
    for name in ("max_tokens", "temperature", "seed"):
        page.locator(f"#{name}").fill("")
    page.locator("#question").fill("how many?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-0 .turn:nth-of-type(2) dl")
    assert page.locator("#pane-0 .turn:nth-of-type(2)").get_by_text("image cached").count() == 1
    page.locator("#new").click()
    page.reload()
    page.wait_for_selector("#preview canvas")
    assert page.locator(".turn").count() == 0


def test_a_video_goes_with_the_question_if_the_model_takes_videos(page: Any, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"clip")
    page.locator("#file").set_input_files(str(tmp_path / "clip.mp4"))
    until(lambda: "takes no videos" in page.locator("#status").inner_text(), "it is refused by name")
    sent = list[Any]()

    def models(route: Any) -> None:
        listed = route.fetch().json()
        listed["data"][0]["vtx"]["videos"] = True
        route.fulfill(json=listed)

    def chat(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        route.fulfill(status=400, json={"error": {"message": "no"}})

    page.route("**/v1/models", models)
    page.route("**/v1/chat/completions", chat)
    page.reload()
    until(lambda: "video" in (page.locator("#file").get_attribute("accept") or ""), "videos can be chosen")
    page.locator("#file").set_input_files(str(tmp_path / "clip.mp4"))
    page.wait_for_selector("#preview video")
    page.locator("#question").fill("what happens?")
    page.locator("#ask").click()
    page.wait_for_selector("#pane-0 .wrong")
    video, text = sent[0]["messages"][0]["content"]
    assert video == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,Y2xpcA=="}}
    assert text == {"type": "text", "text": "what happens?"}


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
