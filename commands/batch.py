"""vtx-batch: a file of questions to a file of answers. It parses, calls and prints."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vtx.commands.shared.bundles import find_bundle
from vtx.commands.shared.options import PATH, Depth, option, options
from vtx.runtime.errors import RequestError
from vtx.runtime.terminal.console import INCOMPLETE, bar, command, end_on_sigterm, note
from vtx.tools.common.loading import Loading

if TYPE_CHECKING:
    from vtx.runtime.prompt.guiding import Guide
    from vtx.tools.common.cluster import Cluster


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The options of vtx-batch."""

    questions: Path
    answers: Path
    bundle: str | None
    images: Path | None
    k: Depth
    rest: str | None
    reduce: str
    max_new_tokens: int
    guide: Guide | None
    max_bad: int
    parallel: int
    cluster: Cluster | None
    loading: Loading


@command(
    epilog="vtx-batch questions.jsonl answers.jsonl\nvtx-batch questions.jsonl answers.jsonl --images photos --k 16\n"
    "vtx-batch questions.jsonl answers.jsonl --bundle /shared/llava-7b --ray-address auto"
)
@click.argument("questions", type=PATH)
@click.argument("answers", type=PATH)
@options(
    "bundle",
    "images",
    "k",
    "rest",
    "reduce",
    "max_new_tokens",
    "guide",
    option("--max-bad", 100, "Stop after more than this many failed lines.", type=click.IntRange(0)),
    option("--parallel", 8, "Lines answered concurrently; each needs memory for its K and V.", type=click.IntRange(1)),
    "cluster",
    "device",
    "compute",
    "threads",
    "fit",
    "require_signature",
    record=BatchSettings,
)
def batch(settings: BatchSettings) -> None:
    """Answer each line of QUESTIONS, {"image": NAME or list, "question": ...}, and write ANSWERS in the same order.

    A line may set its own "system" text, "k", "rest", "reduce", "about", sampling, "schema", "choices", "regex" or
    "grammar". Lines of OpenAI's batch file, {"custom_id", "method", "url", "body"}, get answers in its form. After an
    interrupt, the same command resumes. Failed lines are reported and have an "error" in ANSWERS; with any, the exit
    code is 1. With an "incomplete" answer, which was cut before its form was complete, it is 3.
    """
    from vtx.runtime.api.options import Options
    from vtx.runtime.policies.spec import parse
    from vtx.tools.batch.cluster import answer_on_cluster
    from vtx.tools.batch.run import Answers, Asking, Batch, on_this_machine, run_batch
    from vtx.tools.batch.tasks import read_tasks
    from vtx.tools.common.files import check_folder

    end_on_sigterm()
    asking = Asking(
        settings.k,
        settings.reduce,
        Options(settings.max_new_tokens, guide=settings.guide, rest=settings.rest),
        settings.max_bad,
        settings.loading,
        settings.parallel,
    )
    if settings.answers.exists() and settings.questions.exists() and settings.answers.samefile(settings.questions):
        raise RequestError(
            f"{settings.answers} holds the questions, which the answers would replace; name another file"
        )
    check_folder(settings.answers)
    if settings.reduce != "default":
        parse(settings.reduce)
    tasks = read_tasks(settings.questions, settings.images)
    folder = find_bundle(settings.bundle, (settings.k,))
    with ExitStack() as resources:
        if settings.cluster is not None:
            answer: Answers = partial(answer_on_cluster, settings.cluster, folder.resolve(), asking)
        else:
            answer = on_this_machine(resources.enter_context(settings.loading.load(folder)), asking)
        batch = Batch(folder, tasks, settings.answers, asking)
        outcome = run_batch(answer, batch, report=resources.enter_context(bar()), warn=note)
    if outcome.failed:
        raise RequestError(
            f"{outcome.failed} of {len(tasks.lines)} lines failed; their errors are in {settings.answers}; fix these "
            "lines and run again"
        )
    note(f"{len(tasks.lines)} answers in {settings.answers}")
    if outcome.incomplete:
        note(
            f'{outcome.incomplete} were cut before their form was complete ("incomplete"); raise --max-new-tokens, '
            "or bound the form's fields"
        )
        click.get_current_context().exit(INCOMPLETE)
