"""Drawn sets for `vtx-eval` in the files of POPE and VQAv2: `python demo/benchmarks.py --out build/benchmarks`.

The scenes are none that the demo model was trained on, the questions those that it knows. POPE's are asked three of
what is there and three of what is not, about each picture: `random` takes any shape that is absent, `adversarial` one
of which the colour or the shape is there. VQAv2's ten annotators agree, but write numbers and articles as people do.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from vtx.tools.data.scene_questions import KINDS, ask
from vtx.tools.data.scenes import COLORS, SHAPES, Scene, photograph, random_scene

SEED = 9_000_000_000  # neither trained on nor used by evaluate.py
PAIRS = 3
SUBTYPE = "drawn"
WORDS = ("zero", "one", "two", "three", "four", "five", "six")
Drawn = list[tuple[int, Scene, Image.Image]]


def scenes(count: int) -> Iterator[tuple[int, Scene, Image.Image]]:
    rng = random.Random(SEED)
    for number in range(1, count + 1):
        scene = random_scene(rng)
        yield number, scene, photograph(scene, rng)


def name_of(number: int) -> str:
    """As COCO names its pictures."""
    return f"COCO_{SUBTYPE}_{number:012d}.jpg"


def absent(scene: Scene, near: bool) -> list[str]:
    """Things that are not in a scene; `near` ones share a colour or a shape with one that is."""
    there = {thing.name for thing in scene.things}
    colors, shapes = ({getattr(thing, part) for thing in scene.things} for part in ("color", "shape"))
    everything = [(color, shape) for color in COLORS for shape in SHAPES if f"{color} {shape}" not in there]
    return [f"{c} {s}" for c, s in everything if not near or c in colors or s in shapes]


def pope(drawn: Drawn, near: bool) -> Iterator[dict[str, Any]]:
    rng, number = random.Random(SEED + near), 0
    for image, scene, _ in drawn:
        there = sorted({thing.name for thing in scene.things})
        count = min(PAIRS, len(there))
        for name, label in zip(
            [*rng.sample(there, count), *rng.sample(absent(scene, near), count)],
            ["yes"] * count + ["no"] * count,
            strict=True,
        ):
            number += 1
            article = "an" if name.startswith("orange") else "a"
            text = f"Is there {article} {name} in the image?"
            yield {"question_id": number, "image": name_of(image), "text": text, "label": label}


def as_people_write(answer: str, rng: random.Random) -> str:
    """The same answer after VQA's normalisation."""
    if answer.isdigit():
        return rng.choice((answer, answer, WORDS[int(answer)], f"{answer}."))
    return rng.choice((answer, answer, answer.capitalize(), f"the {answer}", f"{answer}."))


def vqa(drawn: Drawn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions and annotations: one of each kind about each picture."""
    rng, questions, annotations = random.Random(SEED), list[dict[str, Any]](), list[dict[str, Any]]()
    for image, scene, _ in drawn:
        for number, kind in enumerate(KINDS):
            if asked := ask(scene, kind, rng):
                ids = {"image_id": image, "question_id": 1000 * image + number}
                written = [as_people_write(asked.answer, rng) for _ in range(10)]
                humans = [
                    {"answer": text, "answer_confidence": "yes", "answer_id": n} for n, text in enumerate(written, 1)
                ]
                plain = "yes/no" if asked.answer in ("yes", "no") else "number" if asked.answer.isdigit() else "other"
                questions.append({**ids, "question": asked.question})
                annotations.append(
                    {
                        **ids,
                        "question_type": kind,
                        "answer_type": plain,
                        "multiple_choice_answer": asked.answer,
                        "answers": humans,
                    }
                )
    return questions, annotations


def write(out: Path, count: int) -> None:
    """Pictures and files of `count` scenes."""
    images, drawn = out / "images", list(scenes(count))
    images.mkdir(parents=True, exist_ok=True)
    for number, _, picture in drawn:
        picture.save(images / name_of(number), "JPEG", quality=92)
    for name, near in (("random", False), ("adversarial", True)):
        lines = [json.dumps(line) + "\n" for line in pope(drawn, near)]
        (out / f"pope_{name}.json").write_text("".join(lines))
    questions, annotations = vqa(drawn)
    head = {"data_type": "mscoco", "data_subtype": SUBTYPE, "license": {}, "info": {}}
    (out / "vqa_questions.json").write_text(json.dumps({**head, "questions": questions}))
    (out / "vqa_annotations.json").write_text(json.dumps({**head, "annotations": annotations}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--scenes", type=int, default=100)
    args = parser.parse_args()
    write(args.out, args.scenes)
    print(f"drawn sets of {args.scenes} scenes are in {args.out}")


if __name__ == "__main__":
    main()
