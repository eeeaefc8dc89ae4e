"""OpenAI's own Python client against a server in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundles import export
from tests.support.serving import serving, user
from tests.support.tiny import random_image
from vtx.exporter.bundling.options import DEMO
from vtx.runtime.api.model import Model

ROOT = Path(__file__).resolve().parents[3]
openai = pytest.importorskip("openai", reason="needs the openai package, of the extra dev")
IMAGE, OTHER = random_image(1), random_image(2, (40, 90))
FIELDS = {"model": "tiny", "max_tokens": 8, "extra_body": {"k": 3, "reduce": "none", "ignore_eos": True}}


@pytest.fixture(scope="module")
def client(tiny_bundle: Path) -> Iterator[Any]:
    with (
        serving({"tiny": tiny_bundle}, api_keys=["secret"]) as served,
        openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0) as client,
    ):
        yield client


def expected(local: Model, *messages: dict[str, Any]) -> Any:
    return local.generate(messages, k=3, reduce="none", max_new_tokens=8, ignore_eos=True)


def test_an_answer_with_two_images(client: Any, local: Model) -> None:
    messages = [{"role": "system", "content": "the image is red"}, user("which?", IMAGE, OTHER)]
    completion = client.chat.completions.create(messages=messages, **FIELDS)
    answer = expected(local, *messages)
    assert completion.choices[0].message.content == answer.text
    assert completion.usage.vtx["token_ids"] == list(answer.token_ids)
    assert completion.usage.vtx["k"] == 3


def test_a_stream_and_the_turn_after_it(client: Any, local: Model) -> None:
    messages = [user("red?", IMAGE)]
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=messages, stream=True, stream_options=options, **FIELDS))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(local, *messages).text
    assert chunks[-1].usage.completion_tokens == 8
    messages += [{"role": "assistant", "content": text}, user("how many?")]
    completion = client.chat.completions.create(messages=messages, **FIELDS)
    assert completion.usage.vtx["token_ids"] == list(expected(local, *messages).token_ids)
    assert completion.usage.prompt_tokens_details.cached_tokens > 0


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has tiny") as missing:
        client.chat.completions.create(messages=[user("red?")], **{**FIELDS, "model": "other"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="K = 4 was not prebuilt"):
        client.chat.completions.create(messages=[user("red?")], model="tiny", extra_body={"k": 4})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.slow
def test_the_program_of_the_page_prints_an_answer_and_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/how-to/serve.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    bundle = export(Path(DEMO), tmp_path / "demo", (16,), "fp16").folder
    with serving({"vtx-demo-k16-fp16": bundle}) as served:
        names: dict[str, Any] = {}
        exec(program.replace("http://127.0.0.1:8000/v1", served.url), names)
        names["client"].close()
    assert capsys.readouterr().out == "5 390912\n"
