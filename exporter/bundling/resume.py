"""Whether an interrupted export can be resumed: by the key of its weights, options and sources."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from vtx.exporter.bundling.prepare import Plan
from vtx.exporter.weights.journal import key_in
from vtx.runtime.bundle.bundle import MANIFEST
from vtx.runtime.bundle.seal import unseal


def can_resume(folder: Path, key: str) -> bool:
    """Whether `folder` was left by an export with that key. If so, its manifest is removed."""
    if key_in(folder) != key:
        return False
    (folder / MANIFEST).unlink(missing_ok=True)
    unseal(folder / MANIFEST)
    return True


def key_of(plan: Plan) -> str:
    """Equal for two exports that write the same weights and golden vectors from unchanged source files.

    A source file is the same by its path, inode, size and time of change, as they were when its header was read, and a
    checkpoint by some bytes of each tensor. The device's number is left out: it may change when a machine starts again.
    """
    sources = []
    for file in plan.weights.files:
        source = file.entries[0].source.identity
        header = hashlib.sha256(file.header or b"").hexdigest()
        sources.append([file.name, str(file.source), source and source[1:], header])
    options = replace(plan.options, retain=None, aware=None)  # the first settles the manifest only
    aware = plan.options.aware.digest() if plan.options.aware else None
    tower = plan.text_tower.checkpoint.fingerprint() if plan.text_tower else None
    identity = [plan.checkpoint.fingerprint(), tower, str(options), list(plan.ks), plan.template, sources, aware]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
