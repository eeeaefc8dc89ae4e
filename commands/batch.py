"""vtx-batch: a file of questions to a file of answers. It parses, calls and prints."""

from __future__ import annotations

from pathlib import Path

import click

from vtx.commands.export import find_bundle
from vtx.commands.shared.options import (
    bundle_option,
    compute_option,
    device_option,
    fit_option,
    threads_option,
)
from vtx.runtime.errors import RequestError
from vtx.runtime.terminal.console import bar, command, end_on_sigterm, note, require_signature_option
from vtx.runtime.terminal.depth import Depth, DepthType


@command(
    epilog="vtx-batch questions.jsonl answers.jsonl\nvtx-batch questions.jsonl answers.jsonl --images photos --k 16\n"
    "vtx-batch questions.jsonl answers.jsonl --bundle /shared/llava-7b --ray-address auto"
)
@click.argument("questions", type=click.Path(path_type=Path))
@click.argument("answers", type=click.Path(path_type=Path))
@bundle_option
@click.option("--images", type=click.Path(path_type=Path), help="Where images lie [default: beside QUESTIONS].")
@click.option(
    "--k", type=DepthType(default=True), default="default", metavar="N|auto|none", help="[default: the bundle's]"
)
@click.option("--reduce", default="default", metavar="SPEC|none", help="[default: the bundle's first]")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option(
    "--max-bad", type=click.IntRange(0), default=100, show_default=True, help="End after more failed lines than this."
)
@click.option("--ray-address", metavar="ADDR", help="Answer on a Ray cluster: host:port, or auto.")
@device_option
@compute_option
@threads_option
@fit_option
@require_signature_option
def batch(
    questions: Path, answers: Path, bundle: str | None, images: Path | None, k: Depth, reduce: str,
    max_new_tokens: int, max_bad: int, ray_address: str | None, device: str, compute: str | None, threads: int | None,
    fit: str | None, require_signature: Path | None,
) -> None:  # fmt: skip
    """Answer the lines of QUESTIONS, {"image": NAME or list, "question": ...}, into ANSWERS, in order.

    A line may have its own "k" and "reduce". Interrupted, the same command goes on where it was. Failed lines are
    reported and have an "error" in ANSWERS; with any, the exit code is 1.
    """
    from vtx.runtime.api.load import load
    from vtx.runtime.api.options import Options
    from vtx.runtime.policies.spec import parse
    from vtx.tools.batch.cluster import WorkerEngine, answer_on_cluster
    from vtx.tools.batch.run import How, on_this_machine, run_batch
    from vtx.tools.batch.tasks import read_tasks
    from vtx.tools.common.files import check_folder

    end_on_sigterm()
    how = How(k, reduce, Options(max_new_tokens), max_bad, device, compute, fit)
    if answers.exists() and questions.exists() and answers.samefile(questions):
        raise RequestError(f"{answers} holds the questions, which the answers would replace; name another file")
    check_folder(answers)
    if reduce != "default":
        parse(reduce)
    tasks = read_tasks(questions, images)
    folder = find_bundle(bundle, (k,))
    if ray_address:
        key = None if require_signature is None else require_signature.resolve()
        engine = WorkerEngine(folder.resolve(), device, compute, threads, fit, key)
        with bar() as report:
            bad = run_batch(
                lambda lines: answer_on_cluster(ray_address, engine, lines, how), folder, tasks, answers, how,
                report=report, tell=note,
            )  # fmt: skip
    else:
        with load(
            folder, device=device, compute=compute, threads=threads, fit=fit, require_signature=require_signature
        ) as model:
            answer = on_this_machine(model, how)
            with bar() as report:
                bad = run_batch(answer, folder, tasks, answers, how, report=report, tell=note)
    if bad:
        raise RequestError(
            f"{bad} of {len(tasks.lines)} lines failed; {answers} has their errors beside the answers to the others; "
            "fix these lines and run again"
        )
    note(f"{len(tasks.lines)} answers in {answers}")
