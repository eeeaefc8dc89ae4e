"""A batch: its answers are kept as they come and written in the order of the lines; an interrupted one resumes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import DEFAULT, K, Options, combined
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.bundle.files import replacing
from vtx.runtime.errors import ExportError, ImageError, ModelClosedError, RequestError, TemplateError
from vtx.runtime.server.limits import Limits
from vtx.runtime.server.objects import Objects
from vtx.runtime.server.refusal import Refusal, refusal_of
from vtx.runtime.server.remote import RemoteImage
from vtx.runtime.server.request import ChatRequest, read_request
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.units import Progress
from vtx.runtime.vision.video import video
from vtx.tools.batch.tasks import BadLine, Task, Tasks
from vtx.tools.common.loading import Loading
from vtx.tools.data.journal import ResultJournal

AHEAD = 2  # lines whose images are decoded while another is answered
BAD = (ImageError, RequestError, TemplateError, Refusal)  # a line's own fault; anything else ends the batch
Line = Task | BadLine
Result = dict[str, Any]
Answers = Callable[[Sequence[Line]], Iterable[tuple[Line, Result]]]  # in any order, each line once


@dataclass(frozen=True, slots=True)
class Asking:
    """Settings of all lines, except for a line's own. With more than `most_bad` bad lines the batch ends."""

    k: K
    reduce: str | None
    options: Options
    most_bad: int
    loading: Loading = field(default_factory=Loading)


def journal_of(out: Path) -> Path:
    """The file of the answers of an unfinished batch, next to its output."""
    return out.with_name(f".{out.name}.journal")


def run_batch(
    answer: Answers, folder: Path, tasks: Tasks, out: Path, asking: Asking, *, report: Progress,
    warn: Callable[[str], None],
) -> int:  # fmt: skip
    """Let `answer` answer all lines by the bundle in `folder`, and write `out`, whole or not at all.

    Returns the number of bad lines. Each answer is on disk at once. What an earlier run of the same lines, model and
    options has answered is not asked again, unless an image of the line has changed since. `warn` gets a message for
    each bad line. Raises RequestError for too many bad lines, or a journal of another batch; ExportError if the
    output cannot be written.
    """
    identity = {
        "model": str(folder.resolve()), "bundle": sha256(folder / "vtx.json"), "lines": tasks.digest, "k": asking.k,
        "reduce": asking.reduce, "options": asdict(asking.options), "device": asking.loading.device,
        "compute": asking.loading.compute, "fit": asking.loading.fit,
    }  # fmt: skip
    with ResultJournal(journal_of(out), identity) as journal:
        keys = {line.number: line.key for line in tasks.lines}
        kept = [journal.results[key] for key in keys.values() if key in journal.results]
        reasons = [_error(result) for result in kept if result.get("error")]
        _check_bad(reasons, asking.most_bad)
        left = [line for line in tasks.lines if keys[line.number] not in journal.results]
        done = len(kept)
        report("lines", done, len(tasks.lines))
        for line, result in answer(left):
            journal.add({keys[line.number]: result})
            if result.get("error"):
                reasons.append(_error(result))
                warn(f"line {line.number}: {reasons[-1]}")
                _check_bad(reasons, asking.most_bad)
            done += 1
            report("lines", done, len(tasks.lines))
        try:
            with replacing(out) as partial, partial.open("w", encoding="utf-8") as file:
                for number, key in keys.items():
                    result = journal.results[key]
                    result = result if "custom_id" in result else {"line": number, **result}
                    file.write(json.dumps(result, ensure_ascii=False) + "\n")
        except OSError as e:
            raise ExportError(f"cannot write {out} ({e.strerror}); free some space and run again") from e
    with suppress(OSError):
        journal_of(out).unlink()
    return len(reasons)


def on_this_machine(model: Model, asking: Asking) -> Answers:
    """Answer lines one after the other. Raises RequestError for a K or a reduction that the bundle lacks."""
    model.loaded.policy(asking.k, asking.options, asking.reduce)
    return lambda lines: zip(lines, answer_lines(model, lines, asking), strict=True)


def _error(result: Result) -> str:
    error = result["error"]
    return str(error if isinstance(error, str) else error["message"])


def _check_bad(reasons: Sequence[str], most: int) -> None:
    if len(reasons) > most:
        raise RequestError(
            f"{len(reasons)} lines cannot be answered, the limit is {most}; fix them, or raise --max-bad. "
            f"The last: {reasons[-1]}"
        )


Read = tuple[tuple[PreparedImage, ...], ChatRequest | None]  # a line's images, and the request of OpenAI's batches


def answer_lines(model: Model, lines: Sequence[Line], asking: Asking) -> Iterator[Result]:
    """The result of each line, in order. Consecutive questions about the same images share their caches."""
    conversation: Conversation | None = None
    for line, images in _prepared(model, lines, asking):
        if isinstance(line, BadLine):
            yield {"id": None, "error": line.reason}
            continue
        try:
            held, chat = images.result()
            if conversation is None or [i.key for i in held] != [i.key for i in conversation.images]:
                if conversation is not None:
                    conversation.close()
                conversation = Conversation(model.loaded, held)
            if chat is not None:
                settings = [chat.settings(number) for number in range(chat.n)]
                answers = [conversation.stream_messages(chat.messages, one, resume=True).read() for one in settings]
                objects = Objects(chat.model, model, chat.options.logprobs, notes=chat.notes)
                body = json.loads(json.dumps(objects.completion(answers)))
                yield _openai(line, {"status_code": 200, "request_id": objects.id, "body": body})
                continue
            own = {"k": asking.k, "reduce": asking.reduce, **line.own}
            k, reduce, options = own.pop("k"), own.pop("reduce"), combined(asking.options, own)
            answer = conversation.ask(line.question, k, options, reduce=reduce)
        except ModelClosedError:
            raise
        except BAD as e:
            refusal = refusal_of(e)
            reply = {"status_code": refusal.status, "request_id": "", "body": refusal.body()}
            yield {"id": line.id, "error": str(e)} if line.request is None else _openai(line, reply, refusal)
        else:
            yield {"id": line.id, "question": line.question, **json.loads(json.dumps(answer.to_dict()))}


def _openai(line: Task, reply: dict[str, Any], refusal: Refusal | None = None) -> Result:
    """A line of the output of OpenAI's batches."""
    error = None if refusal is None else {"code": refusal.code, "message": str(refusal)}
    return {"id": f"batch_req_{line.number}", "custom_id": line.id, "response": reply, "error": error}


def _prepared(model: Model, lines: Sequence[Line], asking: Asking) -> Iterator[tuple[Line, Future[Read]]]:
    """Each line with its images, which another thread decodes a few lines ahead."""
    limits = Limits(new_tokens=model.manifest.max_context)

    def read(line: Line) -> Read:
        if isinstance(line, BadLine):
            return (), None
        if line.request is not None:
            chat = read_request(line.request, limits)
            sources = [image for image in chat.images if not isinstance(image, RemoteImage)]
            images = model.loaded.prepare_all(sources, messages=chat.messages)
            model.loaded.check_system(chat.messages)
            k, reduce = (asking.k if chat.k == DEFAULT else chat.k), chat.reduce
            chat = replace(chat, images=(), k=k, reduce=asking.reduce if reduce == DEFAULT else reduce)
            return images, chat
        return model.loaded.prepare_all([*line.images, *map(video, line.videos)]), None

    with ThreadPoolExecutor(1, "vtx-batch") as pool:
        waiting = deque[tuple[Line, Future[Read]]]()
        try:
            for line in lines:
                waiting.append((line, pool.submit(read, line)))
                if len(waiting) > AHEAD:
                    yield waiting.popleft()
            yield from waiting
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
