"""`vtx.export`: an export from Python."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from vtx.exporter.bundling.export import run_export
from vtx.exporter.bundling.options import ExportOptions
from vtx.exporter.bundling.prepare import plan_export
from vtx.runtime.bundle.bundle import Bundle

log = logging.getLogger(__name__)


def _ignore(phase: str, done: int, total: int) -> None:
    """No progress is shown."""


def export(
    model: str,
    out: str | os.PathLike[str],
    *,
    k: Sequence[int] | int = (),
    precision: str = "fp16",
    reduce: Sequence[str] | str = (),
    max_context: int | None = None,
    force: bool = False,
    progress: Callable[[str, int, int], None] = _ignore,
) -> Bundle:
    """Export a checkpoint to the bundle directory `out`, as `vtx-export` does.

    Args:
        model: a directory in Hugging Face's layout, a repository's name on the hub, or "demo".
        out: the bundle's directory; it must not exist, unless `force` is set.
        k: the Ks to prebuild, each the first layer without image tokens.
        precision: of the weights: "fp32", "fp16", "bf16", "int8" or "int4".
        reduce: specs of the reductions to prepare for, the default first.
        max_context: KV slots; the model's own limit when left out.
        force: replace a bundle that stands at `out`.
        progress: gets (phase, done, total) as the work proceeds.

    Returns:
        The bundle, which `vtx.load` opens by its `folder`.

    Raises:
        CheckpointError: the checkpoint is damaged, or of a model that vtx does not export.
        ExportError: `out` exists, or the disk or the memory is too small.
        RequestError: a K or a reduction that this model does not have.

    """
    ks = (k,) if isinstance(k, int) else tuple(k)
    reductions = (reduce,) if isinstance(reduce, str) else tuple(reduce)
    options = ExportOptions(model, ks, precision, max_context, reductions=reductions)
    return run_export(plan_export(options), Path(out), force=force, report=progress, say=log.info)
