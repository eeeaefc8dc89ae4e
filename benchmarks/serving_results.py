"""Writes docs/measurements/results/serving.jsonl from what the benchmarks of serving gave with --json.

    python -m benchmarks.serving_results FOLDER

FOLDER holds any of pictures*.json, parts-*.json, batches.json, deadlines*.json, load.json, load-no-amx.json,
towers-*.json, conversations-*.json, one-picture-*.json and soak.json, as the commands below wrote them. Tables of files
that are not there stay as they are. `benchmarks.serving_suite` runs all of them.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUIET_PERCENT = 10  # of the cores busy at most before a measurement on a quiet machine
RESULTS = Path("docs/measurements/results/serving.jsonl")
Table = tuple[list[str], list[list[str]]]


def pictures(found: Any) -> Table:
    clients = sorted({row["clients"] for row in found["rows"]})
    columns = ["", *(f"{number} client{'s' * (number > 1)}, s a request" for number in clients), "8 clients, of one"]
    rows = []
    for key in dict.fromkeys((row["installation"], row["kind"]) for row in found["rows"]):
        cells = {row["clients"]: row for row in found["rows"] if (row["installation"], row["kind"]) == key}
        ratio = cells[8]["cpu_s_a_request"] / cells[1]["cpu_s_a_request"]
        whole = key[1].startswith("one ")  # all questions together
        least_most = [f"{min(c['rounds']):.3f} to {max(c['rounds']):.3f}" for c in (cells[n] for n in clients)]
        values = [
            f"{cells[n]['cpu_s_a_request']:.3f} ({spread})" for n, spread in zip(clients, least_most, strict=True)
        ]
        name = key[1] if key[0] == "vtx" else f"{key[0]}: {key[1]}"
        rows.append([name, *values, f"{ratio:.2f}" + (f", all {8 * ratio:.2f}" if whole else "")])
    return columns, rows


def parts(found: Any) -> Table:
    names = ("tower", "prompts", "tokens", "copies", "rest", "all")
    rows = [
        [row["kind"], *(f"{row[name]:.3f} ({100 * row[name] / row['all']:.0f}%)" for name in names)]
        for row in found["rows"]
    ]
    return ["", *(f"{name}, s" for name in names)], rows


def batches(found: Any) -> Table:
    rows = []
    for row in found["rows"]:
        (alone,) = (r for r in found["rows"] if r["command"] == row["command"] and r["installation"] == "one at a time")
        times = row["answers_a_second"] / alone["answers_a_second"]
        side = "side by side" if row["installation"] == "vtx" else row["installation"]
        figures = f"{row['answers_a_second']:.2f}", f"{row['cpu_s_an_answer']:.3f}", f"{times:.2f}"
        rows.append([row["command"], side, str(row["answers"]), *figures])
    return ["", "", "answers", "answers/s", "CPU s per answer", "of one at a time"], rows


def deadlines(found: Any) -> Table:
    columns = ["K and reductions", "deadline, ms", "requests/s", "kept, %", "refused, %", "expected accuracy", "chosen"]
    rows = []
    for row in found["rows"]:
        chosen = ", ".join(f"{name}: {count}" for name, count in row["methods"].items())
        expected = "" if row["expected"] is None else f"{row['expected']:.3f}"
        shares = f"{100 * row['kept']:.0f}", f"{100 * row['refused']:.0f}"
        rows.append([row["method"], str(found["deadline_ms"]), f"{row['rate']:g}", *shares, expected, chosen])
    return columns, rows


def load(found: Any) -> Table:
    columns = ["", "requests/s", "requests", "failed", "first token p50, s", "p99", "whole answer p50, s", "p99"]
    rows = []
    for row in found["rows"]:
        times = [f"{row[what][share]:.2f}" for what in ("first_s", "whole_s") for share in ("p50", "p99")]
        rows.append([row["side"], f"{row['rate']:g}", str(row["requests"]), str(row["failed"]), *times])
    return columns, rows


def towers(found: Any) -> Table:
    rows = [
        [
            str(row["pictures"]),
            f"{row['device']}, {row['compute']}",
            f"{1000 * row['cpu_s_a_picture']:.1f}",
            f"{row['of_one_a_pass']:.2f}",
        ]
        for row in found["rows"]
    ]
    return ["pictures per pass", "engine", "CPU ms per picture", "vs. one per pass"], rows


def conversations(found: Any) -> Table:
    columns = ["K", "used, MB", "held, MB", "process, MB", "reserved at the whole context, MB", "conversations per GB"]
    rows = [
        [
            row["k"],
            *(f"{row[part] / 1e6:.1f}" for part in ("used", "held", "process", "context")),
            f"{1e9 / row['process']:.1f}",
        ]
        for row in found["rows"]
    ]
    return columns, rows


def soak(found: Any) -> Table:
    sizes = [size for _, size in found["rss_mib"]]
    requests = ", ".join(f"{count:,} {what}" for what, count in sorted(found["requests"].items()))
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(found["statuses"].items()))
    memory = [f"{size:.0f}" for size in (sizes[0], sizes[len(sizes) // 4], sizes[-1], max(sizes))]
    columns = ["minutes", "requests", "mutilated bodies by status", "RSS at the start, MiB", "after a quarter"]
    return [*columns, "at the end", "most"], [[f"{found['rss_mib'][-1][0] / 60:.0f}", requests, statuses, *memory]]


# of a file: the rows of its table
SECTIONS: dict[str, Callable[[Any], Table]] = {
    "pictures": pictures,
    "pictures-before": pictures,
    "parts-openvino": parts,
    "parts-cpu": parts,
    "towers-openvino": towers,
    "towers-cpu": towers,
    "batches": batches,
    "deadlines": deadlines,
    "deadlines-demo": deadlines,
    "load": load,
    "load-no-amx": load,
    "conversations-cpu": conversations,
    "conversations-openvino": conversations,
    "one-picture-openvino": conversations,
    "one-picture-cpu": conversations,
    "soak": soak,
}


def main() -> None:
    write(Path(sys.argv[1]))


def write(folder: Path) -> None:
    """Write the tables of what the folder has."""
    old = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    lines = [json.loads(line) for line in old]
    for name, table in SECTIONS.items():
        if (path := folder / f"{name}.json").exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            columns, rows = table(found)
            machine = found["machine"]
            busy = machine.get("busy_before", 100)
            quiet = "" if busy < QUIET_PERCENT else f", next to other work ({busy:g}% of the cores busy before)"
            models = dict.fromkeys((row["model"], row["precision"]) for row in found.get("rows", [found]))
            shape = "".join(f", {model} in {precision}" for model, precision in models)
            head = {
                "table": name,
                "columns": columns,
                "align": ["---", *["---:"] * (len(columns) - 1)],
                "caption": f"run on CPU: {machine['cpu']}{shape}{quiet}",
            }
            lines = [line for line in lines if line["table"] != name]
            lines += [head, *({"table": name, "row": row} for row in rows)]
    RESULTS.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    runpy.run_path("docs/measurements/tables.py", run_name="__main__")


if __name__ == "__main__":
    main()
