"""A batch: its answers are kept as they come and written in the order of the lines; an interrupted one resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from vtx.runtime.api.model import Model
from vtx.runtime.api.options import DEFAULT, K, Options, Settings, combined
from vtx.runtime.api.prompts import opening_parts
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.bundle.files import replacing
from vtx.runtime.checks import check_text
from vtx.runtime.errors import ExportError, ImageError, ModelClosedError, RequestError, TemplateError
from vtx.runtime.prompt.messages import Message
from vtx.runtime.scheduler.engine import AnswerRequest, Capacity, Engine
from vtx.runtime.server.endpoints import ENDPOINTS, named_images
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.openai.request import ChatRequest, read_request
from vtx.runtime.server.refusal import Refusal, refusal_of
from vtx.runtime.server.remote import RemoteImage
from vtx.runtime.server.sent import NamedImage, SentImages
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.units import Progress
from vtx.runtime.vision.video import video
from vtx.tools.batch.tasks import BadLine, Task, Tasks
from vtx.tools.common.loading import Loading
from vtx.tools.data.journal import ResultJournal

PARALLEL = 8  # lines that are answered at the same time
BAD = (ImageError, RequestError, TemplateError, Refusal)  # a line's own fault; anything else ends the batch
Line = Task | BadLine
Result = dict[str, Any]
Answers = Callable[[Sequence[Line]], Generator[tuple[Line, Result]]]  # in any order, each line once


@dataclass(frozen=True, slots=True)
class Asking:
    """Settings of all lines, except for a line's own. With more than `most_bad` bad lines the batch ends.

    `parallel`: lines that are answered at the same time.
    """

    k: K
    reduce: str | None
    options: Options
    most_bad: int
    loading: Loading = field(default_factory=Loading)
    parallel: int = PARALLEL

    @property
    def capacity(self) -> Capacity:
        """The capacity for these lines; conversations are kept for further questions about the same images."""
        return Capacity(self.parallel, self.parallel, kept=self.parallel)


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines for the bundle in `folder`, and the file `out` of their answers."""

    folder: Path
    tasks: Tasks
    out: Path
    asking: Asking

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the answers depend on."""
        return {
            "model": str(self.folder.resolve()),
            "bundle": sha256(self.folder / "vtx.json"),
            "lines": self.tasks.digest,
            "k": self.asking.k,
            "reduce": self.asking.reduce,
            "options": asdict(self.asking.options),
            "device": self.asking.loading.device,
            "compute": self.asking.loading.compute,
            "fit": self.asking.loading.fit,
        }


def journal_of(out: Path) -> Path:
    """The file of the answers of an unfinished batch, next to its output."""
    return out.with_name(f".{out.name}.journal")


class BatchResult(NamedTuple):
    """Numbers of lines: those that failed, and those whose answer was cut before its form was complete."""

    failed: int
    incomplete: int


def run_batch(answer: Answers, batch: Batch, *, report: Progress, warn: Callable[[str], None]) -> BatchResult:
    """Let `answer` answer all lines of a batch, and write its file, whole or not at all.

    Each answer is on disk at once. What an earlier run of the same lines, model and options has answered is not asked
    again, unless an image of the line has changed since. `warn` gets a message for each bad line. Raises RequestError
    for too many bad lines, or a journal of another batch; ExportError if the output cannot be written.
    """
    lines = batch.tasks.lines
    most_bad = batch.asking.most_bad
    with ResultJournal(journal_of(batch.out), batch.identity) as journal:
        keys = {line.number: line.key for line in lines}
        kept = [journal.results[key] for key in keys.values() if key in journal.results]
        reasons = [_error(result) for result in kept if result.get("error")]
        _check_bad(reasons, most_bad)
        left = [line for line in lines if keys[line.number] not in journal.results]
        done = len(kept)
        report("lines", done, len(lines))
        with closing(answer(left)) as results:
            for line, result in results:
                journal.add({keys[line.number]: result})
                if result.get("error"):
                    reasons.append(_error(result))
                    warn(f"line {line.number}: {reasons[-1]}")
                    _check_bad(reasons, most_bad)
                done += 1
                report("lines", done, len(lines))
        try:
            with replacing(batch.out) as partial, partial.open("w", encoding="utf-8") as file:
                for number, key in keys.items():
                    result = journal.results[key]
                    result = result if "custom_id" in result else {"line": number, **result}
                    file.write(json.dumps(result, ensure_ascii=False) + "\n")
        except OSError as e:
            raise ExportError(f"cannot write {batch.out} ({e.strerror}); free some space and run again") from e
    with suppress(OSError):
        journal_of(batch.out).unlink()
    return BatchResult(len(reasons), sum("incomplete" in journal.results[key] for key in keys.values()))


def on_this_machine(model: Model, asking: Asking) -> Answers:
    """Answer lines side by side. Raises RequestError for a K or a reduction that the bundle lacks."""
    model.loaded.policy(asking.k, asking.options, asking.reduce)

    def answer(lines: Sequence[Line]) -> Generator[tuple[Line, Result]]:
        with Engine("batch", model, asking.capacity) as engine:
            yield from answer_lines(engine, lines, asking)

    return answer


def _error(result: Result) -> str:
    error = result["error"]
    return str(error if isinstance(error, str) else error["message"])


def _check_bad(reasons: Sequence[str], most: int) -> None:
    if len(reasons) > most:
        raise RequestError(
            f"{len(reasons)} lines cannot be answered, the limit is {most}; fix them, or raise --max-bad. "
            f"The last: {reasons[-1]}"
        )


def answer_lines(engine: Engine, lines: Sequence[Line], asking: Asking) -> Iterator[tuple[Line, Result]]:
    """The result of each line, as they end. Questions about the same images are asked one after the other."""
    firsts: dict[Any, int] = {}
    alike = [firsts.setdefault(pictures_of(line), number) for number, line in enumerate(lines)]
    ordered = [lines[number] for number in sorted(range(len(lines)), key=lambda number: (alike[number], number))]
    chats: dict[int, ChatRequest] = {}  # those of OpenAI's lines that are being answered, by their number
    for line, found in engine.answers(_asked(engine.model, ordered, asking, chats)):
        chat = chats.pop(line.number, None)
        if isinstance(found, Exception):
            if isinstance(found, ModelClosedError) or not isinstance(found, BAD):
                raise found
            yield line, _failed(line, found)
        elif chat is not None and isinstance(line, Task):
            objects = ENDPOINTS[line.url].objects(chat, engine.model)
            body = json.loads(json.dumps(objects.whole(found)))
            yield line, _openai(line, {"status_code": 200, "request_id": objects.id, "body": body})
        elif isinstance(line, Task):
            yield line, {"id": line.id, "question": line.question, **json.loads(json.dumps(found[0].to_dict()))}


def pictures_of(line: Line) -> Any:
    """The images and videos of a line, equal for lines that go together; of OpenAI's lines only the line is known."""
    return (line.images, line.videos) if isinstance(line, Task) and line.request is None else line.number


def _failed(line: Line, error: Exception) -> Result:
    if line.is_openai:
        refusal = refusal_of(error)
        return _openai(line, {"status_code": refusal.status, "request_id": "", "body": refusal.body()}, refusal)
    return {"id": line.id, "error": str(error)}


def _asked(
    model: Model, lines: Sequence[Line], asking: Asking, chats: dict[int, ChatRequest]
) -> Iterator[tuple[Line, list[AnswerRequest] | Exception]]:
    """Each line with what it asks, or its error; the request of OpenAI's lines goes into `chats`."""
    limits = Limits(new_tokens=model.manifest.max_context)
    loaded = model.loaded
    images = tuple[PreparedImage, ...]()
    pictures = None
    for line in lines:
        try:
            if isinstance(line, BadLine):
                raise RequestError(line.reason)
            if line.request is None:
                if pictures != pictures_of(line):  # else they are those of the line before
                    images = loaded.images.prepare_all([*line.images, *map(video, line.videos)])
                    pictures = pictures_of(line)
                check_text("the question", line.question)
                messages: list[Message] = [{"role": "user", "content": opening_parts(images, line.question)}]
                own = {"k": asking.k, "reduce": asking.reduce, **line.own}
                if (system := own.pop("system", None)) is not None:
                    check_text("system", system)
                    messages.insert(0, {"role": "system", "content": system})
                    loaded.prompts.check_system(messages)
                k = own.pop("k")
                reduce = own.pop("reduce")
                settings = Settings(k, combined(asking.options, own), reduce)
                yield line, [AnswerRequest.of(loaded, images, messages, settings)]
                continue
            chat = read_request(line.request, limits, translate=ENDPOINTS[line.url].translate)
            chat = named_images(chat, SentImages(0), "")  # each line has its own
            sources = [image for image in chat.images if not isinstance(image, RemoteImage | NamedImage)]
            seen = loaded.images.prepare_all(sources, messages=chat.messages)
            loaded.prompts.check_system(chat.messages)
            loaded.prompts.check_thinking(chat.messages, chat.options)
            k = asking.k if chat.k == DEFAULT else chat.k
            reduce = chat.reduce
            chat = replace(chat, images=(), k=k, reduce=asking.reduce if reduce == DEFAULT else reduce)
            chats[line.number] = chat
            yield (
                line,
                [
                    AnswerRequest.of(loaded, seen, chat.prompt_of(number), chat.settings(number))
                    for number in range(chat.answers)
                ],
            )
        except BAD as e:
            yield line, e


def _openai(line: Line, reply: dict[str, Any], refusal: Refusal | None = None) -> Result:
    """A line of the output of OpenAI's batches."""
    error = None if refusal is None else {"code": refusal.code, "message": str(refusal)}
    return {"id": f"batch_req_{line.number}", "custom_id": line.id, "response": reply, "error": error}
