"""Which answers survive K with a rest, on a real decoder that reads a passage in the image's place?

    make real-weights
    python -m benchmarks.rest build/real-weights/qwen2.5-coder-0.5b --rows build/rest-0.5b.jsonl --write

Layers run one by one over transformers' own: the whole prompt up to the last layer once, and from each K on a second
time without the passage's tokens but those of the rest, which keep their positions. The answer without withdrawal is
forced, so a greedy answer is the same where it has the largest logit at each of its tokens. The order of passages is
fixed; an interrupted run resumes from its rows. `--write` puts the cells of all rows into the results.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import markdown
from benchmarks.rest_passages import Passage, passages
from benchmarks.rest_tables import KEPT, Row, kept_table, raw_table, read_rows, shown, table, write_tables
from torch import Tensor

from vtx.runtime.vision.tokens import share

OPEN = "<|im_start|>user\nAnswer the question about this text with exact words of the text and nothing else.\n\n"
CLOSE = "<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
NEW_TOKENS = 8
COMPARED = 0.1  # the rest at which other choices are measured
CHOICES = "last", "mean", "random"  # by the prompt's last token, by the mean of the question's tokens, at random
SHARED = -1  # the group of tokens that every question sees


@dataclass(frozen=True, slots=True)
class Prompts:
    """Several questions about one image as one row of tokens; each sees what is shared, and itself.

    `embeddings` [tokens, hidden]; `groups` [tokens] numbers the questions, which follow the text before the image and
    the image, from `start` to `stop`.
    """

    embeddings: Tensor
    groups: Tensor
    start: int
    stop: int

    @property
    def questions(self) -> int:
        return int(self.groups.max()) + 1

    def rows(self, question: int) -> list[int]:
        """The places of a question's tokens."""
        return (self.groups == question).nonzero()[:, 0].tolist()


def visible(groups: Tensor, count: int) -> Tensor:
    """True where the last `count` rows see a row: it is not behind, and shared or of the same question."""
    behind = torch.ones(count, len(groups), dtype=torch.bool).triu(len(groups) - count + 1)
    return ~behind & ((groups == SHARED) | (groups == groups[-count:, None]))


class Decoder:
    """A Qwen2 or Llama decoder of a vision-language checkpoint, its layers run one at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForImageTextToText

        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.head = model.lm_head.train(False)
        self.text = model.model.language_model.train(False)
        self.layers = list(self.text.layers)

    def run(self, number: int, hidden: Tensor, positions: Tensor, seen: Tensor, cache: Any = None) -> Tensor:
        """Hidden states [tokens, hidden] after layer `number`, 1-based; `seen` [tokens, cached and these]."""
        mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, torch.finfo(hidden.dtype).min)
        states: Tensor = self.layers[number - 1](
            hidden[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            position_embeddings=self.text.rotary_emb(hidden[None], positions[None]),
        )
        return states[0]

    def attention(self, number: int, hidden: Tensor, positions: Tensor, seen: Tensor, rows: list[int]) -> Tensor:
        """What the `rows` attend to in layer `number`, mean over heads: [rows, tokens], float32."""
        from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

        attention = self.layers[number - 1].self_attn
        states = self.layers[number - 1].input_layernorm(hidden)
        query, key = (
            projection(states).view(1, len(hidden), -1, attention.head_dim).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *self.text.rotary_emb(hidden[None], positions[None]))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = (query[:, :, rows] @ key.transpose(2, 3)).float()[0] * attention.scaling
        weights: Tensor = logits.masked_fill(~seen[rows], -torch.inf).softmax(-1)
        return weights.mean(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 of hidden states [tokens, hidden] after the last layer."""
        logits: Tensor = self.head(self.text.norm(hidden))
        return logits.float()


@dataclass(frozen=True, slots=True)
class Full:
    """Prompts and their answers without withdrawal: `states[n]` [tokens, hidden] is what enters layer n + 1.

    The answers' tokens, but for the last of each, follow those of the prompts, which are `length`.
    """

    prompts: Prompts
    length: int
    positions: Tensor
    answers: list[list[int]]
    states: list[Tensor]
    logits: list[Tensor]


def run_full(decoder: Decoder, prompts: Prompts, new_tokens: int, end: int) -> Full:
    """Greedy answers of at most `new_tokens`, the token `end` included."""
    from transformers import DynamicCache

    cache = DynamicCache()
    groups = prompts.groups
    questions = torch.arange(prompts.questions)
    after = [prompts.stop + torch.arange(len(prompts.rows(question))) for question in questions.tolist()]
    positions = torch.cat([torch.arange(prompts.stop), *after])
    last = torch.tensor([prompts.rows(question)[-1] for question in questions.tolist()])
    parts = list[list[Tensor]]()
    hidden = prompts.embeddings
    logits = list[Tensor]()
    while True:
        count = len(hidden)
        seen = visible(groups, len(hidden))
        part = [hidden]
        for number in range(1, len(decoder.layers) + 1):
            hidden = decoder.run(number, hidden, positions[-count:], seen, cache)
            part.append(hidden)
        parts.append(part)
        logits.append(decoder.logits(hidden[last] if len(parts) == 1 else hidden))
        ended = torch.stack([each.argmax(-1) == end for each in logits]).any(0)
        if len(logits) == new_tokens or bool(ended.all()):
            break
        hidden = decoder.text.embed_tokens(logits[-1].argmax(-1))
        later = positions[last] + len(logits)
        groups = torch.cat([groups, questions])
        positions = torch.cat([positions, later])
    ids = torch.stack([each.argmax(-1) for each in logits], 1).tolist()
    answers = [answer[: answer.index(end) + 1] if end in answer else answer for answer in ids]
    states = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
    of_answers = [torch.stack(logits)[: len(answer), number] for number, answer in enumerate(answers)]
    return Full(prompts, len(prompts.embeddings), positions, answers, states, of_answers)


def chosen(decoder: Decoder, full: Full, k: int, count: int, choice: str, seed: int) -> list[list[int]]:
    """For each question the `count` places of the image's tokens that stay from layer `k` on, in their order."""
    prompts = full.prompts
    picks = list[list[int]]()
    places = range(prompts.start, prompts.stop)
    length = full.length
    states = full.states[k - 2][:length]
    positions = full.positions[:length]
    seen = visible(prompts.groups, length)
    for question in range(prompts.questions):
        if choice == "random":
            picks.append(sorted(random.Random(f"{seed} {question} {k}").sample(places, count)))
            continue
        rows = prompts.rows(question)[-1:] if choice == "last" else prompts.rows(question)
        scores = decoder.attention(k - 1, states, positions, seen, rows).mean(0)[prompts.start : prompts.stop]
        ranked = scores.argsort(descending=True, stable=True)[:count]
        picks.append(sorted((ranked + prompts.start).tolist()))
    return picks


def run_withdrawn(decoder: Decoder, full: Full, k: int, rest: list[list[int]]) -> list[Tensor]:
    """The logits of each answer where layers from `k` on see no tokens of the image but the question's `rest`."""
    prompts = full.prompts
    places = [*range(prompts.start)]
    groups = [SHARED] * prompts.start
    choosing = list[int]()
    for question, answer in enumerate(full.answers):
        first = full.length + question
        answered = [first + step * prompts.questions for step in range(len(answer) - 1)]
        own = rest[question] + prompts.rows(question) + answered
        places = places + own
        groups = groups + [question] * len(own)
        choosing += range(len(places) - len(answer), len(places))
    hidden = full.states[k - 1][places]
    positions = full.positions[places]
    seen = visible(torch.tensor(groups), len(groups))
    for number in range(k, len(decoder.layers) + 1):
        hidden = decoder.run(number, hidden, positions, seen)
    return list(decoder.logits(hidden[choosing]).split([len(answer) for answer in full.answers]))


class Reader:
    """A decoder with its tokenizer, which makes prompts of passages."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoTokenizer

        self.decoder = Decoder(folder, dtype)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.end: int = self.tokenizer.convert_tokens_to_ids(END)

    def prompts(self, passage: Passage) -> Prompts:
        texts = [OPEN, passage.text, *(f"\n\n{question.text}{CLOSE}" for question in passage.questions)]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        groups = [SHARED, SHARED, *range(len(passage.questions))]
        numbers = [number for number, tokens in zip(groups, ids, strict=True) for _ in tokens]
        embeddings = self.decoder.text.embed_tokens(torch.tensor([token for tokens in ids for token in tokens]))
        start = len(ids[0])
        return Prompts(embeddings, torch.tensor(numbers), start, start + len(ids[1]))

    def text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()


def cells(layers: int, ks: Sequence[int], rests: Sequence[float]) -> Iterator[tuple[int, float, str]]:
    """K, rest and choice of each cell, K above the last layer left out."""
    for k in ks:
        if k > layers:
            continue
        yield from ((k, rest, "last") for rest in rests)
        yield from ((k, COMPARED, choice) for choice in CHOICES[1:])


@torch.inference_mode()
def measure(reader: Reader, number: int, passage: Passage, ks: Sequence[int], rests: Sequence[float]) -> list[Row]:
    """The rows of a passage's questions; K = 0 is the answer without withdrawal."""
    decoder = reader.decoder
    rows = list[Row]()
    layers = len(decoder.layers)
    full = run_full(decoder, reader.prompts(passage), NEW_TOKENS, reader.end)
    image = full.prompts.stop - full.prompts.start

    def note(k: int, rest: float, choice: str, count: int, logits: list[Tensor]) -> None:
        for place, question in enumerate(passage.questions):
            answer = full.answers[place]
            length = full.prompts.stop + len(full.prompts.rows(place))
            likeliest = logits[place].argmax(-1).tolist()
            same = likeliest == answer
            if question.kind == "yes-no":
                right = reader.text(likeliest[:1]).lower() == question.answer
            else:
                right = same and question.answer.lower() in reader.text(answer).lower()
            first, whole = (each[place][0].log_softmax(-1) for each in (logits, full.logits))
            kl = float((first.exp() * (first - whole)).sum())
            cost = 1 - (layers - k + 1) * (image - count) / (layers * length) if k else 1.0
            name = number * len(passage.questions) + place
            rows.append(Row(name, question.kind, k, rest, choice, round(cost, 4), float(f"{kl:.3g}"), same, right))

    note(0, 1.0, "last", image, full.logits)
    for k, rest, choice in cells(layers, ks, rests):
        count = share(rest, image) if rest else 0
        tokens = chosen(decoder, full, k, count, choice, number)
        note(k, rest, choice, count, run_withdrawn(decoder, full, k, tokens))
    return rows


def extend(args: argparse.Namespace, done: int) -> None:
    """Append the rows of the passages that follow the first `done`, until the time is up."""
    began = time.monotonic()
    reader = Reader(args.checkpoint, getattr(torch, args.dtype))
    for number, passage in list(enumerate(passages(args.passages)))[done:]:
        if time.monotonic() - began > 60 * args.minutes:
            return
        rows = measure(reader, number, passage, args.k, args.rest)
        with args.rows.open("a", encoding="utf-8") as out:
            out.write(json.dumps([asdict(row) for row in rows]) + "\n")
        print(f"passage {number + 1} of {args.passages}, {time.monotonic() - began:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rows", type=Path, required=True, help="rows, one passage a line")
    parser.add_argument("--passages", type=int, default=50, help="eight questions each")
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8, 12, 16, 18, 20, 22, 24, 26, 28])
    parser.add_argument("--rest", type=float, nargs="+", default=[0, 0.02, 0.05, 0.1, 0.2, 0.4], help="shares")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no passage after that many")
    parser.add_argument("--write", action="store_true", help="put the cells into the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    done = len(args.rows.read_text(encoding="utf-8").splitlines()) if args.rows.exists() else 0
    if done < args.passages:
        extend(args, done)
    rows = read_rows(args.rows)
    name = args.checkpoint.name.replace(".", "-")
    caption = f"{args.checkpoint.name} in {args.dtype}, questions about passages of text in the image's place"
    cells = [*table(name, rows, caption)]
    if args.write:
        write_tables({name: cells, f"{name}-rows": [*raw_table(f"{name}-rows", rows)]})
        write_tables({KEPT: [*kept_table()]})
    print(markdown([cells[0]["columns"], *([shown(cell) for cell in line["row"]] for line in cells[1:])]))


if __name__ == "__main__":
    main()
