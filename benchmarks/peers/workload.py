"""The questions that everybody answers: two about one picture and one before them about another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import picture
from benchmarks.peers.contract import Question

SENTENCE = "What is in the picture, and where does it stand? "


@dataclass(frozen=True, slots=True)
class Workload:
    """`warm` loads what is loaded lazily; `first` and `second` are about one image that was not seen before."""

    warm: Question
    first: Question
    second: Question


def make(checkpoint: Path, folder: Path, tokens: int) -> Workload:
    """Prompts of `tokens` ids, or as close below as the tokenizer allows, pictures in `folder`.

    Raises:
        ValueError: `tokens` leaves no room for a question beside the image.

    """
    from vtx.exporter.bundling.options import ExportOptions
    from vtx.exporter.bundling.prepare import plan_export

    plan = plan_export(ExportOptions(str(checkpoint), (), "fp32"))
    height, side = plan.image.size
    if height != side:
        raise ValueError(f"the tower takes {side}x{height} pixels; rivals were only tried with squares")
    return asked_of(plan, folder, side, tokens)


def asked_of(plan: Any, folder: Path, side: int, tokens: int) -> Workload:
    """As `make`, of an export's plan, with square pictures of `side` pixels."""
    images = []
    for seed in (1, 2):
        images.append(folder / f"picture-{seed}.png")
        picture.write(images[-1], side, seed)
    ask = Asker(plan)
    return Workload(
        warm=ask(images[0], "Describe this.", tokens),
        first=ask(images[1], "Please say: ", tokens),
        second=ask(images[1], "Now answer: ", tokens),
    )


class Asker:
    """Makes questions with the checkpoint's own template and tokenizer."""

    def __init__(self, plan: Any) -> None:
        from vtx.runtime.errors import RequestError
        from vtx.runtime.prompt.template import ShapingTemplate
        from vtx.runtime.prompt.text import Text
        from vtx.runtime.prompt.tokenizer import parse_tokenizer

        self._text = Text(parse_tokenizer(plan.tokenizer, RequestError), plan.template, plan.text)
        self._renderer = ShapingTemplate(plan.template, plan.text)
        self._settings = plan.text
        self._layout = plan.config.layout

    def __call__(self, image: Path, start: str, tokens: int) -> Question:
        from vtx.runtime.vision.image import image_size

        picture = self._layout.prompt_image(*image_size(image))
        asked = self._filled(start, tokens, picture)
        ids = self._ids(asked, picture)
        front = len(ids) - ids[::-1].index(self._settings.image_token_id)
        text = self._renderer.render(self._chat(asked), add_generation_prompt=True)
        return Question(str(image.resolve()), asked, text, ids, self._settings.image_token_id, front)

    def _filled(self, start: str, tokens: int, picture: Any) -> str:
        """`start` and as many characters more as keep the prompt, the `picture` in it, within `tokens`."""
        least = len(self._ids(start.strip(), picture))
        if least > tokens:
            raise ValueError(f"{tokens} tokens do not hold an image and a question, which take {least}; ask for more")
        whole = start + SENTENCE * (tokens // 4)
        fits = len(start)
        beyond = len(whole)
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            taken = len(self._ids(whole[:middle].strip(), picture))
            fits, beyond = (middle, beyond) if taken <= tokens else (fits, middle)
        return whole[:fits].strip()

    def _ids(self, asked: str, picture: Any) -> tuple[int, ...]:
        return tuple(map(int, self._text.prompt(self._chat(asked), [picture])))

    @staticmethod
    def _chat(asked: str) -> Any:
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": asked}]}]
