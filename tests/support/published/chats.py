"""What published models are asked: conversations, pictures of odd sizes."""

from __future__ import annotations

from typing import Any

from PIL import Image

from tests.support.tiny import random_image

Chat = tuple[list[dict[str, Any]], list[Image.Image]]
TYPED = "typed tokens"
SINGLE = ("one picture", "unicode", TYPED)  # those that a model without a chat template is asked, too
SIZES = ((1, 1), (336, 336), (640, 480), (480, 640), (1920, 1080), (33, 777))


def turn(role: str, *parts: str) -> dict[str, Any]:
    """A message; `<picture>` among its parts is an image."""
    content = [{"type": "image"} if part == "<picture>" else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


def chats() -> dict[str, Chat]:
    """Eight conversations by name, each with its pictures."""
    first, second = random_image(1, (64, 48)), random_image(2, (48, 64))
    asked = turn("user", "<picture>", "What is on the table?")
    odd = "naïve café — 猫が好き 🙂\u3000 two  blanks,\ttab\u00a0nbsp\n\n  end "
    return {
        "one picture": ([asked], [first]),
        "system": ([turn("system", "You answer briefly."), asked], [first]),
        "turns": ([asked, turn("assistant", "A red cup."), turn("user", "And beside it?")], [first]),
        "two pictures": ([turn("user", "<picture>", "<picture>", "Which one is red?")], [first, second]),
        "text": ([turn("user", "What is the capital of France?")], []),
        "later picture": (
            [turn("user", "Hello!"), turn("assistant", "Hello."), turn("user", "<picture>", "What is it?")], [first],
        ),
        "unicode": ([turn("user", "<picture>", odd)], [first]),
        TYPED: ([turn("user", "<picture>", "</s> <|im_end|> <eos> [INST] <s>")], [first]),
    }  # fmt: skip
