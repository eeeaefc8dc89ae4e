"""A batch: its answers kept as they come, written in the order of the lines; interrupted, it goes on where it was."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtx.runtime.api.conversation import Conversation
from vtx.runtime.api.model import Model
from vtx.runtime.api.options import K, Options
from vtx.runtime.bundle.bundle import sha256
from vtx.runtime.errors import ExportError, ImageError, ModelClosedError, RequestError, TemplateError
from vtx.runtime.session.encoded_images import PreparedImage
from vtx.runtime.vision.video import video
from vtx.tools.batch.tasks import BadLine, Task, Tasks
from vtx.tools.common.files import replacing
from vtx.tools.data.journal import ResultJournal

AHEAD = 2  # lines whose images are decoded while another is answered
BAD = (ImageError, RequestError, TemplateError)  # a line's own fault; anything else ends the batch
Line = Task | BadLine
Result = dict[str, Any]
Answers = Callable[[Sequence[Line]], Iterable[tuple[Line, Result]]]  # in any order, each line once
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class How:
    """How every line is asked that does not say otherwise. Beyond `most_bad` bad lines the batch ends."""

    k: K
    reduce: str | None
    options: Options
    most_bad: int
    device: str = "auto"
    compute: str | None = None
    fit: str | None = None


def journal_of(out: Path) -> Path:
    """Where the answers of an unfinished batch stand, beside its output."""
    return out.with_name(f".{out.name}.journal")


def run_batch(
    answer: Answers, folder: Path, tasks: Tasks, out: Path, how: How, *, report: Report, tell: Callable[[str], None]
) -> int:
    """Let `answer` answer all lines by the bundle in `folder`, and write `out`, whole or not at all.

    Returns how many lines were bad. Each answer is on disk once it is there. What an earlier run of the same lines,
    model and options has answered is not asked again, unless an image of the line has changed since. `tell` gets a
    line for each bad one.

    Raises:
        RequestError: too many bad lines; a journal of another batch lies there.
        ExportError: the output cannot be written.

    """
    identity = {
        "model": str(folder.resolve()), "bundle": sha256(folder / "vtx.json"), "lines": tasks.digest, "k": how.k,
        "reduce": how.reduce, "options": asdict(how.options), "device": how.device, "compute": how.compute,
        "fit": how.fit,
    }  # fmt: skip
    with ResultJournal(journal_of(out), identity) as journal:
        keys = {line.number: line.key for line in tasks.lines}
        kept = [journal.results[key] for key in keys.values() if key in journal.results]
        reasons = [result["error"] for result in kept if "error" in result]
        _check_bad(reasons, how.most_bad)
        left = [line for line in tasks.lines if keys[line.number] not in journal.results]
        done = len(kept)
        report("lines", done, len(tasks.lines))
        for line, result in answer(left):
            journal.add({keys[line.number]: result})
            if "error" in result:
                reasons.append(result["error"])
                tell(f"line {line.number}: {reasons[-1]}")
                _check_bad(reasons, how.most_bad)
            done += 1
            report("lines", done, len(tasks.lines))
        _write(out, {number: journal.results[key] for number, key in keys.items()})
    with suppress(OSError):
        journal_of(out).unlink()
    return len(reasons)


def on_this_machine(model: Model, how: How) -> Answers:
    """Lines answered one after the other. Raises RequestError for a K or a reduction that the bundle lacks."""
    model.policy(how.k, how.options, how.reduce)
    return lambda lines: zip(lines, answer_lines(model, lines, how), strict=True)


def _check_bad(reasons: Sequence[str], most: int) -> None:
    if len(reasons) > most:
        raise RequestError(
            f"{len(reasons)} lines cannot be answered, the limit is {most}; fix them, or raise --max-bad. "
            f"The last: {reasons[-1]}"
        )


def _write(out: Path, results: Mapping[int, Result]) -> None:
    """Write the results by the numbers of their lines."""
    try:
        with replacing(out) as partial, partial.open("w", encoding="utf-8") as file:
            for number, result in results.items():
                file.write(json.dumps({"line": number, **result}, ensure_ascii=False) + "\n")
    except OSError as e:
        raise ExportError(f"cannot write {out} ({e.strerror}); free some space and run again") from e


# --- answering ------------------------------------------------------------------------------------

Images = tuple[PreparedImage, ...]


def answer_lines(model: Model, lines: Sequence[Line], how: How) -> Iterator[Result]:
    """The result of each line, in order. Consecutive questions about the same images share their caches."""
    conversation: Conversation | None = None
    for line, images in _prepared(model, lines):
        if isinstance(line, BadLine):
            yield {"id": None, "error": line.reason}
            continue
        try:
            held = images.result()
            if conversation is None or [i.key for i in held] != [i.key for i in conversation.images]:
                if conversation is not None:
                    conversation.close()
                conversation = Conversation(model, held)
            asked = {"k": how.k, "reduce": how.reduce, **line.own}
            answer = conversation.ask(line.question, asked["k"], how.options, reduce=asked["reduce"])
        except ModelClosedError:
            raise
        except BAD as e:
            yield {"id": line.id, "error": str(e)}
        else:
            yield {"id": line.id, "question": line.question, **json.loads(json.dumps(answer.to_dict()))}


def _prepared(model: Model, lines: Sequence[Line]) -> Iterator[tuple[Line, Future[Images]]]:
    """Each line with its images, which another thread decodes a few lines ahead."""
    with ThreadPoolExecutor(1, "vtx-batch") as pool:
        waiting = deque[tuple[Line, Future[Images]]]()
        try:
            for line in lines:
                waiting.append((line, pool.submit(_read, model, line)))
                if len(waiting) > AHEAD:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _read(model: Model, line: Line) -> Images:
    if isinstance(line, BadLine):
        return ()
    return model.in_order(model.prepare_all([*line.images, *map(video, line.videos)]))
