"""Tools: functions that an answer may call, a grammar in which every call parses, and the calls in an answer's text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtx.runtime.bundle.safetensors import parse_json
from vtx.runtime.errors import RequestError

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.DOTALL)  # a string, or what nests and separates
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call: the function's `name`, and its `arguments` as JSON text."""

    name: str
    arguments: str

    @property
    def is_complete(self) -> bool:
        """False for the last call of a truncated answer."""
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class CallForm:
    """A family's form of a call: `opening`, the name, `middle`, the arguments, `closing`.

    `between` separates calls; None: an answer has one call.
    """

    opening: str
    middle: str
    closing: str
    between: str | None = None

    def text(self, call: ToolCall) -> str:
        """A call as the template prints it."""
        return f"{self.opening}{call.name}{self.middle}{call.arguments}{self.closing}"

    @property
    def marker(self) -> str:
        """The first line of a call, which no other text of an answer has."""
        return self.opening.partition("\n")[0]

    def split(self, text: str, *, complete: bool) -> tuple[str, list[ToolCall]]:
        """The text of an answer before its calls, and these, the last one as far as it is certain.

        `complete`: nothing more follows.
        """
        at = text.find(self.marker)
        calls = list[ToolCall]()
        if (
            at < 0 and not complete
        ):  # the end may be the beginning of a marker, and blanks before it are none of the text
            known = next(n for n in range(len(self.marker), -1, -1) if text.endswith(self.marker[:n]))
            return text[: len(text) - known].rstrip(), calls
        content = text if at < 0 else text[:at].rstrip()
        while at >= 0 and (middle := text.find(self.middle, at)) >= 0:
            name = text[at + len(self.opening) : middle]
            begin = middle + len(self.middle)
            end = text.find(self.closing, begin) if self.between is not None else -1
            calls.append(ToolCall(name, text[begin : end if end >= 0 else max(begin, len(text) - len(self.closing))]))
            at = -1 if end < 0 else text.find(self.opening, end)
        return content, calls

    def grammar(self, tools: Tools, json_form: Mapping[str, Any], added: Mapping[str, bool]) -> str:
        """The grammar of an answer, in llguidance's Lark.

        `added`: the added tokens, which are markers if they have the form <...>, by their text; True: answers hide it.
        Raises RequestError if they hide a marker.
        """
        tokens = [
            token for token in added if re.fullmatch(r"<[^<>\s]+>", token) and token in self.opening + self.closing
        ]
        if any(added[token] for token in tokens):
            raise RequestError(f"this model's tokenizer hides {', '.join(tokens)} from its answers; leave tools out")
        special = re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")

        def literal(text: str) -> str:
            pieces = special.split(text)  # markers at odd numbers
            return " ".join(piece if n % 2 else json.dumps(piece) for n, piece in enumerate(pieces) if piece)

        functions = tools.allowed
        rest = self.opening.removeprefix(self.marker)
        calls = f"{literal(self.marker)} call"
        if tools.parallel and self.between is not None:
            calls += f" ({literal(self.between + self.marker)} call)*"
        lines = [f"call: {' | '.join(f'f{number}' for number in range(len(functions)))}"]
        for number, function in enumerate(functions):
            schema = {"type": "object", **function.get("parameters", NOTHING), "x-guidance": json_form}
            begin = literal(f"{rest}{function['name']}{self.middle}")
            lines.append(f"f{number}: {begin} %json {json.dumps(schema)} {literal(self.closing)}")
        if tools.choice != "auto":
            return "\n".join([f"start: {calls}", *lines])
        marker = re.escape(self.marker).replace("/", r"\/")
        lines.append(rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{marker}(.|\n)*/")
        if self.marker in tokens:
            return "\n".join([f"start: TEXT | TEXT? {calls}", *lines])
        lines.append(rf"lead[lazy]: /(.|\n)*{marker}/")
        return "\n".join([f"start: TEXT | lead{calls.removeprefix(literal(self.marker))}", *lines])


NOTHING: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}
FORMS = (  # of Hermes, Qwen 2.5 and 3 and InternVL 3; of Llama 3.1 to 3.3
    CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
    CallForm('{"name": "', '", "parameters": ', "}"),
)


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that an answer may call.

    Args:
        functions: in OpenAI's format, {"type": "function", "function": {"name", "description", "parameters"}}.
        choice: "auto", text or calls; "required", at least one call; or the name of the function to call.
        parallel: allow several calls in one answer, if the template supports them.

    Raises:
        RequestError: no function, more than the limit, a malformed one, or a duplicate name.

    """

    functions: Sequence[Mapping[str, Any]] | str  # kept as JSON text
    choice: str = "auto"
    parallel: bool = True

    def __post_init__(self) -> None:
        given = self.functions
        if not isinstance(given, list | tuple) or not 0 < len(given) <= MAX_TOOLS:
            raise RequestError(f"tools is {given!r:.40}; it must be a list of 1 to {MAX_TOOLS} functions")
        names = list[str]()
        for tool in given:
            function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RequestError(
                    f'the tool {tool!r:.60} is not {{"type": "function", "function": {{"name", "parameters"}}}}'
                )
            name = function["name"]
            parameters = function.get("parameters", {})
            if not _NAME.fullmatch(name):
                raise RequestError(f"the name {name!r:.80} of a tool must be 1 to 64 letters, digits, _ or -")
            if not isinstance(parameters, Mapping) or not isinstance(function.get("description", ""), str):
                raise RequestError(f"the parameters of tool {name} must be a JSON schema, its description a string")
            names.append(name)
        if len(set(names)) < len(names):
            raise RequestError("two tools have the same name; rename one")
        if self.choice not in ("auto", "required", *names):
            raise RequestError(f"there is no tool {self.choice!r:.80} to choose; there is {', '.join(names)[:200]}")
        if not isinstance(self.parallel, bool):
            raise RequestError(f"parallel is {self.parallel!r:.40}; it must be True or False")
        try:
            object.__setattr__(self, "functions", json.dumps(list(given), allow_nan=False, ensure_ascii=False))
        except (ValueError, TypeError, RecursionError) as e:
            raise RequestError(f"the tools are not JSON ({' '.join(str(e).split()):.80})") from e

    @property
    def listed(self) -> list[dict[str, Any]]:
        """The functions in OpenAI's format, as the template prints them."""
        listed: list[dict[str, Any]] = json.loads(str(self.functions))
        return listed

    @property
    def allowed(self) -> list[dict[str, Any]]:
        """The functions that may be called: the chosen one, or all."""
        functions = [tool["function"] for tool in self.listed]
        return [one for one in functions if one["name"] == self.choice] or functions


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message in OpenAI's form, their arguments as objects. Raises RequestError.

    Of arguments that end too early, as in an answer that was cut, the whole members count.
    """
    if not isinstance(calls, list | tuple) or len(calls) > MAX_CALLS:
        raise RequestError(f"tool_calls is {calls!r:.40}; it must be a list of at most {MAX_CALLS} calls")
    read = list[dict[str, Any]]()
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise RequestError(f'the call {call!r:.60} is not {{"id", "function": {{"name", "arguments"}}}}')
        given = function.get("arguments") or "{}"
        if isinstance(given, str) and (members := _cut_object(given)) is not None:
            given = members
        elif isinstance(given, str):
            given = parse_json(given.encode("utf-8", "replace"), f"the call of {name!r:.80}", error=RequestError)
        if not isinstance(given, Mapping):
            raise RequestError(f"the arguments of {name!r:.80} are not an object")
        read.append({"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": given}})
    return read


def _cut_object(text: str) -> dict[str, Any] | None:
    """The whole members of a JSON object whose text ends too early; None: the text is anything else."""
    depth = 0  # where members end
    ends = list[int]()
    for part in _JSON_PART.finditer(text):
        if part[0] in "{[":
            depth += 1
        elif part[0] in "}]":
            depth -= 1
        elif part[0] == "," and depth == 1:
            ends.append(part.start())
        if depth == 0:
            return None
    if depth == 0 or not text.lstrip().startswith("{"):
        return None
    if not ends:
        return {} if re.fullmatch(r'\s*\{\s*(".*)?', text, re.DOTALL) else None
    try:
        members = json.loads(text[: ends[-1]] + "}")
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, dict) else None
