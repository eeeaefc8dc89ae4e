"""`vtx.export`: an export from Python."""

from __future__ import annotations

import logging
import numbers
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.bundle.bundle import Bundle
from vtx.runtime.checks import check_text, check_whole
from vtx.runtime.errors import RequestError
from vtx.runtime.units import Progress

log = logging.getLogger(__name__)


def export(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    k: Sequence[int] | int | None = None,
    precision: str | None = None,
    reduce: Sequence[str] | str | None = None,
    max_context: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Export a checkpoint to the bundle directory `out`, as `vtx-export` does.

    Args:
        model: a directory in Hugging Face's layout, a Hugging Face id, or "demo".
        out: output directory; it must not exist unless `force` is set.
        k: values of K to prebuild, each the first layer without image tokens; default: none.
        precision: weight precision: "fp32", "fp16", "bf16", "int8" or "int4"; default: fp16, or the integers of a
            quantised checkpoint.
        reduce: specs of the token reductions to support; the first is the default.
        max_context: KV slots for prompt and answer; default: what the largest image, a question and an answer need, at
            least 4096, up to the model's limit.
        force: replace an existing bundle at `out`.
        progress: called with (phase, done, total) as the export proceeds.

    Returns:
        The bundle; pass its `folder` to `vtx.load`.

    Raises:
        CheckpointError: the checkpoint is damaged, or its model is not supported.
        ExportError: `out` exists, or disk or memory is too small.
        RequestError: this model does not support a K or a reduction, or a value has the wrong type.

    """
    reductions = _several(reduce)
    for spec in reductions:
        check_text("reduce", spec)
    if max_context is not None:
        check_whole("max_context", max_context, 2)
        max_context = int(max_context)  # numpy's, too
    ks = _several(k)
    for depth in ks:
        if isinstance(depth, bool) or not isinstance(depth, numbers.Integral):
            raise RequestError(f"k is {depth!r:.40}; give a whole number from 2, or a list of them")
    options = ExportOptions(os.fsdecode(model), tuple(map(int, ks)), precision, max_context, reductions=reductions)
    return run_export(
        plan_export(options), Path(os.fsdecode(out)), force=force, report=progress or (lambda *_: None), say=log.info
    )


def _several(value: Any) -> tuple[Any, ...]:
    """A tuple of a value that may be left out, given alone, or given as several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)
