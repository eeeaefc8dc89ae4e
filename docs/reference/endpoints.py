"""Writes docs/reference/endpoints.md: `python docs/reference/endpoints.py`.

Addresses are the server's routes, fields the types that requests are read by. The columns of other servers, and the
clients that were tried, are in endpoints.json.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from vtx.runtime.api.options import Options
from vtx.runtime.server import anthropic, ollama
from vtx.runtime.server.app import SHEETS, make_app
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.openai import completions, embeddings, responses
from vtx.runtime.server.openai.fields import NEVER_IGNORED, ChatFields, RawPrompts
from vtx.runtime.server.openai.request import IGNORED, NEUTRAL, OPTIONS, SAMPLING
from vtx.runtime.session.sampling import Sampling
from vtx.tools.fleet.arguments import Fleet

PAGE = Path(__file__).with_suffix(".md")
KNOWN = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
NONE = KNOWN["unmentioned"][0]
NAMES: Mapping[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "", Any: "anything",
}  # fmt: skip
LISTED: Mapping[Any, str] = {str: "texts", int: "whole numbers"}
DEFAULTS = {**dict.fromkeys(OPTIONS, Options()), **dict.fromkeys(SAMPLING, Sampling())}
BLOCKS = (anthropic.MessageTurn, anthropic.Tool, anthropic.CallChoice, anthropic.OutputConfig, anthropic.Thinking)
ITEMS = (
    responses.MessageItem, responses.CallItem, responses.ResultItem, responses.FunctionItem, responses.TextFields,
    responses.Reasoning, responses.ReasoningItem,
)  # fmt: skip


def pages() -> dict[Path, str]:
    """The text of the page."""
    parts = [
        "# Endpoints and fields of vtx-serve",
        "Generated from the server's routes and types by `python docs/reference/endpoints.py`; a test compares them.\n"
        f"{KNOWN['sources']}",
        "## Addresses", _table(("address", "vtx", *KNOWN["servers"]), _addresses()),
        "Addresses under `/v1` are there without it, too.",
        "## Fields of a chat completion", _table(("field", "value", "default", *KNOWN["servers"]), _fields()),
        "`reasoning_effort` switches thoughts on or, with `none` or `minimal`, off, if the chat template has\n"
        "`enable_thinking`, as `chat_template_kwargs` does; else it is refused. The thought is `reasoning_content` of\n"
        "a reply's message and of a stream's deltas. `timings_per_token` adds\n"
        "llama-server's `timings` to the reply, or to a stream's last chunk. `prompt_logprobs` are of the text behind\n"
        "the last picture, null before it; streams, PaliGemma, Gemma 4 E2B and E4B have none. Before `min_tokens` an\n"
        "answer neither ends nor has stop strings.",
        "## Objects in these fields", _objects((ChatFields,)),
        "## Fields of responses",
        "`/v1/responses` has these objects in `input`, `tools`, `text` and `reasoning`, `instructions` as a system\n"
        f"message, and fields of a chat completion, renamed as here: {_renamed(responses.NAMES)}.",
        _objects(ITEMS),
        "## Fields of completions and embeddings",
        f"`/v1/completions` has a `prompt` in place of `messages` and {completions.MAX_TOKENS} `max_tokens` by\n"
        "default: a text, token ids, or a list of these. With `echo` each stands before its answers, with `logprobs`\n"
        "(not in streams) those of its tokens, too. `tools` and fields about thoughts are refused. `/detokenize` and\n"
        "`/v1/embeddings`:",
        _objects((completions.Tokens, embeddings.EmbeddingFields)),
        "## Fields of messages",
        "`/v1/messages` has these objects in `messages`, `tools`, `tool_choice`, `output_config` and `thinking`, a\n"
        f"text `system`, and fields of a chat completion, renamed as here: {_renamed(anthropic.NAMES)}.\n"
        "Anthropic's API has no `k`, `rest`, `reduce` and `deadline_ms`; of its fields, `container`,\n"
        "`context_management` and `mcp_servers` are refused as unknown.",
        _objects(BLOCKS),
        "## Fields of Ollama's addresses",
        "`/api/chat` and `/api/generate` stream unless `stream` is false, and have fields of a chat completion and\n"
        "these in `messages` and `options`. `format` is `json` or a schema, `think` switches thoughts, `keep_alive`\n"
        "has no effect. `/api/generate` has `prompt`, `system`, `images` and `raw` in place of `messages`. Names of\n"
        "bundles may end with `:latest`.",
        _objects((ollama.OllamaMessage, ollama.ModelOptions)),
        "## Several machines",
        "The arguments of [the application for Ray Serve](../how-to/serve-fleet.md).",
        _objects((Fleet,)),
        "## Unknown fields",
        "They are refused, at any depth. With `--lenient` they are ignored and named in the reply, except these:",
        ", ".join(f"`{name}`" for name in sorted(NEVER_IGNORED)),
        "## Clients that were tried", KNOWN["about_clients"], _table(("client", "tried"), KNOWN["clients"]),
    ]  # fmt: skip
    return {PAGE: "\n\n".join(parts) + "\n"}


def addresses() -> list[str]:
    """Methods and paths of the server, without files of its page."""
    app: Any = make_app(typing.cast(Any, types.SimpleNamespace()), Limits())
    while not hasattr(app, "routes"):
        app = app._app  # the access log and the guard around it
    posted = [("POST" if "POST" in route.methods else "GET", route.path) for route in app.routes]
    return [f"{method} {path}" for method, path in posted if path not in SHEETS]


def _addresses() -> Iterator[list[str]]:
    known = KNOWN["addresses"]
    for address in addresses():
        yield [f"`{address}`", *known[address], KNOWN["ollama"]["addresses"].get(address, NONE)]


def _fields() -> Iterator[list[str]]:
    for field in fields(ChatFields):
        yield [*_cells(ChatFields, field), *_elsewhere(field.name, ("yes", "yes"))]
    for name, values in NEUTRAL.items():
        listed = " or ".join(f"`{json.dumps(value)}`" for value in values)
        yield [f"`{name}`", f"only {listed}, without effect", "", *_elsewhere(name, KNOWN["unmentioned"])]
    for name in sorted(IGNORED):
        yield [f"`{name}`", "any, without effect", "", *_elsewhere(name, KNOWN["unmentioned"])]


def _elsewhere(name: str, usual: Iterable[str]) -> list[str]:
    """A field at the other servers; `usual`: at the first two, where nothing else is known of them."""
    return [*KNOWN["fields"].get(name, usual), "yes" if name in KNOWN["ollama"]["fields"] else NONE]


def _objects(kinds: Iterable[type]) -> str:
    """A table of the fields of these types but ChatFields, and of all types within them, each once."""
    queue, rows, done = [*kinds], list[list[str]](), set[type]()
    while queue:
        kind = queue.pop(0)
        if kind in done:
            continue
        done.add(kind)
        queue += [inner for field in fields(kind) for inner in _within(_hints(kind)[field.name])]
        if kind is not ChatFields:
            rows += [[f"`{kind.__name__}`", *_cells(kind, field)] for field in fields(kind)]
    about = "\n".join(
        f"- `{kind.__name__}`: {inspect.getdoc(kind)}" for kind in sorted(done, key=_name) if kind is not ChatFields
    )
    return f"{about}\n\n{_table(('object', 'field', 'value', 'default'), rows)}"


def _name(kind: type) -> str:
    return kind.__name__


def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _within(hint: Any) -> list[type]:
    """The types of objects in a field's type."""
    if is_dataclass(hint):
        return [typing.cast(type, hint)]
    return [kind for part in typing.get_args(hint) for kind in _within(part)]


def _cells(kind: type, field: Field[Any]) -> list[str]:
    """Name, value and default of a field."""
    default = ""
    if field.default is MISSING and field.default_factory is MISSING:
        default = "required"
    else:
        value = getattr(DEFAULTS.get(field.name), field.name, field.default)
        default = f"`{json.dumps(value)}`" if isinstance(value, bool | int | float | str) and value != "" else ""
    return [f"`{field.name}`", _value(_hints(kind)[field.name]), default]


def _value(hint: Any) -> str:
    """A field's type in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(filter(None, (_value(part) for part in parts if part is not RawPrompts)))
    if origin is tuple:
        return f"a list of {LISTED[parts[0]]}" if parts[0] in LISTED else f"a list of {_value(parts[0])}"
    if is_dataclass(hint):
        return f"`{typing.cast(type, hint).__name__}`"
    return NAMES.get(hint, "an object")


def _renamed(names: Mapping[str, str]) -> str:
    return ", ".join(f"`{old}` to `{new}`" for old, new in names.items())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = [*head]
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
