"""Shared by the tests of calibration: questions about random images, and their measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import Tiny, random_image
from vtx.exporter.calibration.calibrate import CalibrationOptions, calibrate
from vtx.exporter.calibration.source import open_source
from vtx.tools.calibration.report import Measurement
from vtx.tools.data.items import Data, Item

GQA = Tiny(layers=6)
QUESTIONS = ("what is there?", "which shape is red?", "how many circles?", "describe the left square", "what colour?")
ALL = CalibrationOptions(k_from=2, max_new_tokens=6, batch=2)
KS = (None, 2, 3, 4, 5, 6)


def questions(images: int = 1, count: int = 5) -> Data:
    items = [Item(tuple(random_image(10 * n + i) for i in range(images)), QUESTIONS[n]) for n in range(count)]
    return Data("questions", tuple(items))


def measure(folder: Path, data: Data, out: Path, options: CalibrationOptions = ALL, **more: Any) -> Measurement:
    return calibrate(open_source(str(folder)), data, options, out, **more)
