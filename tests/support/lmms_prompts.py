"""One question of each benchmark: as lmms-eval's data have it, as its own files have it, and as lmms-eval puts it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tiny import random_image
from vtx.tools.evaluation.questions import QuestionFiles

SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


@dataclass(frozen=True, slots=True)
class Case:
    """`doc` is a row of lmms-eval's data, its task is `definition`; `data` is one of its own `files`."""

    definition: str
    function: str
    doc: dict[str, Any]
    files: dict[str, Any]
    data: str
    prompt: str

    def write(self, folder: Path) -> QuestionFiles:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                random_image(1).save(path)
            else:
                path.write_text(content if isinstance(content, str) else json.dumps(content))
        annotations = folder / "annotations.json"
        return QuestionFiles(folder / self.data, folder.resolve(), annotations if annotations.exists() else None)


TEN = ["yes"] * 10
IDS = {"image_id": 7, "question_id": 7001}
CHOSEN = {"question": "Which of these?", "choices": ["a leaf ", "a root", "the stem"], "answer": 1}
SEED = {"question": "What is it?", "answer": "C", "data_id": "1.jpg", "question_type_id": 1, "data_type": "image"}
SEED |= {f"choice_{letter}": word for letter, word in zip("abcd", ("One", "two", "3", "four"), strict=True)}
CASES = {
    "mme": Case(
        "mme/mme.yaml", "mme.utils.mme_doc_to_text", {"question": "Is it red? Please answer yes or no."},
        {"color/0001.txt": "Is it red? Please answer yes or no.\tYes\n", "color/0001.png": None}, ".",
        f"Is it red?{SHORT}",
    ),
    "textvqa": Case(
        "textvqa/_default_template_textvqa_yaml", "textvqa.utils.textvqa_doc_to_text",
        {"question": "what BRAND is this? ", "ocr_tokens": ["nokia"]},
        {"t.json": {"data": [{"image_id": "a", "question": "what BRAND is this? ", "answers": TEN}]}, "a.jpg": None},
        "t.json", f"What brand is this? {SHORT}",
    ),
    "scienceqa": Case(
        "scienceqa/scienceqa_img.yaml", "scienceqa.utils.sqa_doc_to_text", {**CHOSEN, "hint": "Look at it. "},
        {
            "problems.json": {
                "3": {**CHOSEN, "hint": "Look at it. ", "image": "image.png", "split": "test"},
                "4": {**CHOSEN, "hint": "", "image": None, "split": "test"},
            },
            "test/3/image.png": None,
        },
        ".", f"Context: Look at it. \nWhich of these?\nA. a leaf \nB. a root\nC. the stem{LETTER}",
    ),
    "pope": Case(
        "pope/pope.yaml", "pope.utils.pope_doc_to_text", {"question": "Is there a dog in the image? "},
        {"p.json": {"image": "a.jpg", "text": "Is there a dog in the image? ", "label": "yes"}, "a.jpg": None},
        "p.json", f"Is there a dog in the image?{SHORT}",
    ),
    "vqav2": Case(
        "vqav2/_default_template_vqav2_yaml", "vqav2.utils.vqav2_doc_to_text", {"question": "Is it  Sunny?"},
        {
            "q.json": {"data_subtype": "val2014", "questions": [{**IDS, "question": "Is it  Sunny?"}]},
            "annotations.json": {"annotations": [{**IDS, "answers": TEN, "answer_type": "yes/no"}]},
            "COCO_val2014_000000000007.jpg": None,
        },
        "q.json", f"Is it  Sunny?{SHORT}",
    ),
    "gqa": Case(
        "gqa/gqa.yaml", "gqa.utils.gqa_doc_to_text", {"question": "Is the sky dark?"},
        {"g.json": {"1": {"question": "Is the sky dark?", "answer": "yes", "imageId": "n1"}}, "n1.jpg": None},
        "g.json", f"Is the sky dark?{SHORT}",
    ),
    "vizwiz": Case(
        "vizwiz_vqa/_default_template_vqa_yaml", "vizwiz_vqa.utils.vizwiz_vqa_doc_to_text",
        {"question": "what's THIS"},
        {"v.json": [{"image": "a.jpg", "question": "what's THIS", "answers": [{"answer": a} for a in TEN]}],
         "a.jpg": None},
        "v.json",
        f"What's this\nWhen the provided information is insufficient, respond with 'Unanswerable'.{SHORT}",
    ),
    "seedbench": Case(
        "seedbench/seedbench.yaml", "seedbench.utils.seed_doc_to_text", SEED,
        {"s.json": {"questions": [SEED]}, "1.jpg": None}, "s.json",
        f"What is it?\nA. One\nB. two\nC. 3\nD. four{LETTER}",
    ),
    "choices": Case(
        "ai2d/ai2d.yaml", "ai2d.utils.ai2d_doc_to_text", {"question": CHOSEN["question"], "options": CHOSEN["choices"]},
        {"c.jsonl": {**CHOSEN, "image": "a.jpg"}, "a.jpg": None}, "c.jsonl",
        f"Which of these?\nA. a leaf \nB. a root\nC. the stem{LETTER}",
    ),
}  # fmt: skip
