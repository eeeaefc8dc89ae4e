"""The demo model's tokenizer, prompt format and packing of several questions about one picture."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from vtx.tools.data.scene_questions import SceneQuestion, ask_some
from vtx.tools.data.scenes import COLORS, PLACES, SHAPES, random_scene

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT:' }}{% endif %}"
    "{% if message['content'] is string %}"
    "{{ (' ' if message['role'] == 'assistant' else '') + message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\\n' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ (' ' if message['role'] == 'assistant' else '') + part['text'] }}"
    "{% endif %}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token if eos_token is defined else '</s>' }}"
    "{% else %}{{ ' ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
EXTRA = (
    "Hello, thank you. Please describe this picture for me in one sentence. Who are you and what can you do? "
    "I can see a small house, two people, a dog and some trees near the road. It is not clear to me. "
    "Which one is larger, the first or the second? Are they next to each other? Why? Yes, no, maybe. "
    "one two three four five six seven eight nine ten "
)


def train_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE without case, on the questions and a little English; any text can be encoded."""
    tok = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tok.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(" +"), " ")]
    )
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    lines = [EXTRA] * 50
    for _ in range(4000):
        for item in ask_some(random_scene(rng), 8, rng):
            lines.append(f"USER: \n{item.question} ASSISTANT: {item.answer}")
    for word in (*COLORS, *SHAPES, *PLACES, "crosses", "nothing"):
        lines += [f" {word}"] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(lines, trainer)
    tok.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tok


class Packer:
    """Questions about one picture in one row: apart from each other, or as one conversation."""

    def __init__(self, tok: Tokenizer, vision_tokens: int, length: int) -> None:
        self.tok, self.vision, self.length = tok, vision_tokens, length
        self.prefix = tok.encode("USER: ").ids
        self.at = len(self.prefix)
        self.cache: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        found = self.cache.get(text)
        if found is None:
            found = self.cache[text] = self.tok.encode(text, add_special_tokens=False).ids
        return found

    def turn(self, item: SceneQuestion, *, first: bool) -> tuple[list[int], int]:
        """Token ids of one question with its answer, and how many at the end are the answer's."""
        head = "\n" if first else "USER: "
        asked = self.ids(f"{head}{item.question} ASSISTANT:")
        answer = [*self.ids(f" {item.answer}"), 2]
        return asked + answer, len(answer)

    def pack(self, items: Sequence[SceneQuestion], *, talk: bool) -> tuple[np.ndarray, ...]:
        """ids, labels, positions, block and item numbers, each [length] int64 (labels -100: no answer here).

        Block 0 is the prompt before the picture; in a conversation every turn belongs to it.
        """
        ids, labels = list(self.prefix), [-100] * self.at
        positions, blocks, owner = list(range(self.at)), [0] * self.at, [-1] * self.at
        after = self.at + self.vision
        for number, item in enumerate(items):
            turn, answer = self.turn(item, first=not talk or number == 0)
            if len(ids) + len(turn) > self.length:
                break
            start = len(ids) - self.at if talk else 0
            ids += turn
            labels += [-100] * (len(turn) - answer) + turn[-answer:]
            positions += range(after + start, after + start + len(turn))
            blocks += [0 if talk else number + 1] * len(turn)
            owner += [number] * len(turn)
        pad = self.length - len(ids)
        columns = (
            ids + [3] * pad,
            labels + [-100] * pad,
            positions + [0] * pad,
            blocks + [99] * pad,
            owner + [-1] * pad,
        )
        return tuple(np.array(c, np.int64) for c in columns)


def run_tokenizer(folder: Path, vocab: int) -> Tokenizer:
    """The tokenizer of a training run: trained at its start, and kept for as long as its weights are."""
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer(vocab).save(str(path))
    return Tokenizer.from_file(str(path))
