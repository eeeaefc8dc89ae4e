"""Small drawn sets of five benchmarks, and the answers of a fresh run to each question."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vtx.runtime.api.model import Model
from vtx.tools.data.scenes import COLORS, SHAPES, Scene, photograph, random_scene
from vtx.tools.evaluation.metrics import COGNITION, METRICS, PERCEPTION
from vtx.tools.evaluation.questions import TaskQuestion

SEED, SCENES = 9_200_000_000, 5


@dataclass(frozen=True)
class LocalQuestion:
    """A question about a picture; `choices` of ScienceQA, `answers` of ten people of the VQA sets."""

    task: str
    picture: Image.Image
    image: str
    text: str
    answers: tuple[str, ...]
    group: str = ""
    choices: tuple[str, ...] = ()

    def as_task(self) -> TaskQuestion:
        return TaskQuestion((Path(self.image),), self.text, self.answers, self.image, self.group, len(self.choices))


def local_sets() -> dict[str, list[LocalQuestion]]:
    """Questions that the demo model knows, some with a wrong answer as the right one, so that scores are in between."""
    rng, made = random.Random(SEED), dict[str, list[LocalQuestion]]()

    def add(task: str, *rest: Any, **more: Any) -> None:
        made.setdefault(task, []).append(LocalQuestion(task, *rest, **more))

    for number, group in enumerate((*PERCEPTION, *COGNITION)):
        scene = random_scene(rng, 4)
        picture = photograph(scene, rng)
        for turn, (text, label) in enumerate(yes_and_no(scene)):
            other = {"yes": "no", "no": "yes"}[label]
            add("mme", picture, f"{number}.png", text, (other if number % 5 == 1 and turn else label,), group)
            if number < SCENES:
                add("pope", picture, f"{number}.png", text, (other if number == 0 and turn else label,))
        if number >= SCENES:
            continue
        for wrong in (False, True):
            people = ("3",) * 6 if wrong else ("four",) * 5 + ("4.",) * 3
            people += ("five",) * (10 - len(people))
            add("vqav2", picture, f"{number}.png", "How many shapes are there?", people)
            add("textvqa", picture, f"{number}.png", "How many shapes are there?", people)
        text = "Which?\nA. one\nB. two"
        add("scienceqa", picture, f"{number}.png", text, ("B",), choices=("one", "two"))
    return made


def yes_and_no(scene: Scene) -> list[tuple[str, str]]:
    """A question about what is there, and one about what is not, with their answers."""
    things = {thing.name for thing in scene.things}
    absent = next(f"{c} {s}" for c in COLORS for s in SHAPES if f"{c} {s}" not in things)
    return [(f"Is there a {name} in the image?", label) for name, label in ((min(things), "yes"), (absent, "no"))]


def answers_of(model: Model, questions: list[LocalQuestion], k: int | None, reduce: str) -> list[str]:
    return [
        model.open(question.picture).ask(question.text, k, reduce=reduce, max_new_tokens=16).text
        for question in questions
    ]


def figures(task: str, questions: list[LocalQuestion], texts: list[str]) -> dict[str, float]:
    """Our count of these answers."""
    metric, asked = METRICS[task], [question.as_task() for question in questions]
    tally = metric.tally(asked, [metric.judge(q, text) for q, text in zip(asked, texts, strict=True)])
    return {name: float(figure(tally.counts.sum(0))) for name, figure in tally.figures.items()}
