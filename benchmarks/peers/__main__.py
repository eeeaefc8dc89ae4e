"""Compare vtx with what others use instead: one checkpoint, one prompt, the same threads, one table.

    python -m benchmarks.peers                       every contender, at the shape `1b`
    python -m benchmarks.peers vtx llamacpp:q8_0     some of them
    python -m benchmarks.peers vtx:int8 vtx:int8/9   one bundle with all layers, and with withdrawal at K = 9

Each rival gets an environment and a converted checkpoint of its own, which later runs use again. Each round runs every
contender once, in a process of its own, in another order.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.peers import results, summary, table, workload
from benchmarks.peers.contenders import (
    INSTALLED,
    ROOT,
    US,
    Contender,
    PeerError,
    Places,
    contenders,
    prebuilt,
    prepare,
    run,
)
from benchmarks.peers.contract import AUTO, Result, Work


def main() -> None:
    args = arguments()
    folder = args.work
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = args.checkpoint or made_checkpoint(folder / "checkpoint-1b")
    places = Places(args.venvs or folder, folder, args.torch, args.vtx)
    asked = workload.make(checkpoint, folder, args.prompt_tokens)
    chosen = contenders(args.contenders or ((*INSTALLED, f"{US}@{AUTO}/9") if args.installed else ()))
    failed = prepare_all(chosen, checkpoint, places)
    rounds: dict[Contender, list[Result]] = {c: [] for c in chosen if c not in failed}
    for number in range(0 if args.prepare else args.rounds):
        one_round(rounds, failed, number, places, Work("", "", args.threads, args.new_tokens, **vars_of(asked)))
    if not args.prepare:
        show(rounds, failed, places, asked, args)
    elif failed:
        sys.exit("\n".join(f"{c.name}: {reason}" for c, reason in failed.items()))


def arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(
        prog="benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("contenders", nargs="*", metavar="RIVAL[:PRECISION][/K]", help="[default: all, and vtx/9]")
    found.add_argument("--checkpoint", type=Path, help="a LLaVA in Hugging Face's layout [default: a random one, 1b]")
    found.add_argument("--work", type=Path, default=Path("build/peers"), help="converted checkpoints [%(default)s]")
    found.add_argument("--venvs", type=Path, help="environments [default: in --work]")
    found.add_argument("--torch", default="torch==2.13.0", help='pip\'s words for torch ["%(default)s"]')
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--prompt-tokens", type=int, default=636)
    found.add_argument("--new-tokens", type=int, default=64)
    found.add_argument("--installed", action="store_true", help="every rival without any option but the precision")
    found.add_argument("--vtx", type=Path, metavar="PYTHON", help="of vtx as installed [default: this one]")
    found.add_argument("--prepare", action="store_true", help="install and convert only")
    found.add_argument("--results", type=Path, metavar="FILE", help="with --installed: results of the documentation")
    found.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    return found.parse_args()


def prepare_all(chosen: list[Contender], checkpoint: Path, places: Places) -> dict[Contender, str]:
    """Prepare everybody, one bundle for all K of a precision; who cannot be, and why."""
    failed = dict[Contender, str]()
    for contender in chosen:
        said(f"preparing {contender.name}")
        same = [c for c in chosen if (c.rival, c.stored) == (contender.rival, contender.stored)]
        try:
            prepare(contender, checkpoint, places, {c.k for c in same if c.k is not None})
        except PeerError as error:
            failed[contender] = f"cannot be prepared: {error}"
    return failed


def made_checkpoint(folder: Path) -> Path:
    if not folder.exists():
        command = [sys.executable, ROOT / "benchmarks" / "make_checkpoint.py", "1b", folder]
        subprocess.run([*map(str, command)], check=True)
    return folder


def one_round(
    rounds: dict[Contender, list[Result]], failed: dict[Contender, str], number: int, places: Places, work: Work
) -> None:
    """Every contender once, beginning with another one each time; who fails takes no further part."""
    from dataclasses import replace

    order = [*rounds]
    for contender in order[number % len(order) :] + order[: number % len(order)]:
        own = replace(work, folder=str(places.model(contender).resolve()), precision=contender.precision)
        try:
            found = run(contender, own, places)
            rounds[contender].append(found)
            said(f"round {number + 1}: {contender.name}: {found.in_words()}")
        except PeerError as error:
            said(f"round {number + 1}: {contender.name}: {error}")
            failed[contender] = f"cannot be run: {error}"
            del rounds[contender]


def show(
    rounds: dict[Contender, list[Result]],
    failed: dict[Contender, str],
    places: Places,
    asked: workload.Workload,
    args: argparse.Namespace,
) -> None:
    versions = {name: text for results in rounds.values() for name, text in results[0].versions.items()}
    print(", ".join(f"{name} {text}" for name, text in sorted(versions.items())))
    print(
        f"{len(asked.first.ids)} prompt tokens, {args.new_tokens} new ones, {args.threads} threads, "
        f"{args.rounds} rounds; medians with quartiles, ratios of neighbours"
    )
    ks = {c.stored: prebuilt(c, places) for c in rounds if c.rival == US}
    print(f"prebuilt K of vtx's bundles, which have a stage more for each of them: {in_words(ks)}")
    figures = {c.name: [asdict(result) for result in results] for c, results in rounds.items()}
    figures |= {c.name: {"failed": reason} for c, reason in failed.items()}
    report({"contenders": figures, "prebuilt": ks}, table.rows(rounds, failed), args.json)
    print(summary.in_words(rounds))
    if args.results:
        from datetime import date

        from vtx.tools.bench.machine import describe

        about = (
            f"As installed, without any option but the precision. {describe().cpu}, {args.rounds} rounds, "
            f"{date.today():%B %Y}: medians; † has no image encoder. "
            f"{', '.join(f'{name} {text}' for name, text in sorted(versions.items()))}"
        )
        results.write(args.results, rounds, failed, about)


def in_words(ks: dict[str, list[str]]) -> str:
    return "; ".join(f"{stored}: {', '.join(held) or 'none'}" for stored, held in ks.items()) or "no bundle took part"


def vars_of(asked: workload.Workload) -> dict[str, Any]:
    return {"warm": asked.warm, "first": asked.first, "second": asked.second}


def said(line: str) -> None:
    if os.environ.get("QUIET") is None:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
