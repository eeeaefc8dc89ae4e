"""The measurement of rests on real decoders: its statement is what vtx computes, and its questions can be answered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.rest import SHARED, Decoder, Prompts, chosen, run_full, run_withdrawn
from benchmarks.rest_passages import GENRES, OF_A_PASSAGE, passages
from benchmarks.rest_tables import Row, raw_table, read_rows, table

from tests.support.exported import Models
from tests.support.fixtures import Checkpoints, References
from tests.support.reference import Reference
from tests.support.tiny import Tiny, prompt_messages, random_image
from vtx.runtime.vision.tokens import share

TINY = Tiny(text="qwen2", tokenizer="bytes", theta=1e6)
QUESTIONS = "red?", "How many circle shapes are there?", "left?"
KS = 2, 5, 8
STEPS = 6
NEVER = -1  # no token ends an answer


def prompts_of(judge: Reference) -> Prompts:
    """Three questions about a picture: what they share once, and the tokens of each after the image."""
    embeddings, groups, start, stop = list[torch.Tensor](), list[int](), 0, 0
    for number, question in enumerate(QUESTIONS):
        hidden, is_image = judge.prompt(judge.inputs(prompt_messages(question), [random_image(4)]))
        places = is_image.nonzero()[:, 0].tolist()
        start, stop = places[0], places[-1] + 1
        first = stop if number else 0
        embeddings.append(hidden[0, first:])
        groups += [SHARED] * (stop - first) + [number] * (hidden.shape[1] - stop)
    return Prompts(torch.cat(embeddings), torch.tensor(groups), start, stop)


@pytest.mark.slow
@pytest.mark.parametrize("rest", [0.1, 0.4])
def test_the_statement_gives_the_ids_that_vtx_gives(
    models: Models, tiny_checkpoint: Checkpoints, reference: References, rest: float
) -> None:
    decoder = Decoder(tiny_checkpoint(TINY), torch.float32)
    with torch.inference_mode(), models(TINY, KS).open(random_image(4)) as image:
        full = run_full(decoder, prompts_of(reference(TINY)), STEPS, NEVER)
        count, differing = share(rest, full.prompts.stop - full.prompts.start), 0
        for number, question in enumerate(QUESTIONS):
            whole = image.ask(question, None, max_new_tokens=STEPS, ignore_eos=True)
            assert full.answers[number] == list(whole.token_ids)
            assert full.logits[number].argmax(-1).tolist() == full.answers[number]
        for k in KS:
            places = chosen(decoder, full, k, count, "last", 0)
            logits = run_withdrawn(decoder, full, k, places)
            for number, question in enumerate(QUESTIONS):
                answer = image.ask(question, k, rest=rest, max_new_tokens=STEPS, ignore_eos=True)
                assert answer.stats.reduced is not None
                kept = [place - full.prompts.start for place in places[number]]
                assert answer.stats.reduced.kept[-1].patches == (tuple(kept),)
                same = logits[number].argmax(-1).tolist() == full.answers[number]
                assert same == (list(answer.token_ids) == full.answers[number])
                differing += not same
    assert differing, "every answer stays: nothing is proved"


def test_a_rest_of_everything_changes_no_logit(tiny_checkpoint: Checkpoints, reference: References) -> None:
    decoder = Decoder(tiny_checkpoint(TINY), torch.float32)
    with torch.inference_mode():
        full = run_full(decoder, prompts_of(reference(TINY)), STEPS, NEVER)
        everything = [[*range(full.prompts.start, full.prompts.stop)]] * len(QUESTIONS)
        for withdrawn, whole in zip(run_withdrawn(decoder, full, 3, everything), full.logits, strict=True):
            torch.testing.assert_close(withdrawn, whole, atol=1e-5, rtol=0)


def test_fifty_passages_ask_200_facts_and_200_claims_of_six_genres() -> None:
    texts = list(passages(50))
    assert texts == list(passages(50))
    kinds = Counter(question.kind for passage in texts for question in passage.questions)
    assert kinds == {"fact": 200, "yes-no": 200}
    assert {passage.genre for passage in texts} == set(GENRES)
    assert len(GENRES) == 6
    for passage in texts:
        facts, claims = passage.questions[:OF_A_PASSAGE], passage.questions[OF_A_PASSAGE:]
        assert all(question.answer in passage.text for question in facts)
        assert Counter(question.answer for question in claims) == {"yes": 2, "no": 2}


def test_cells_have_the_shares_of_their_rows(tmp_path: Path) -> None:
    rows = [Row(number, "fact", 12, 0.1, "last", 0.6, 0.5, number < 3, number < 2) for number in range(4)]
    head, line = table("made", rows, "four questions")
    cells = dict(zip(head["columns"], line["row"], strict=True))
    assert cells["questions"] == "4"
    assert [cells[name] for name in ("K", "rest", "choice", "kind", "cost, %")] == ["12", "10%", "last", "fact", "60.0"]
    assert [cells[name][0] for name in ("same answer, %", "right, %")] == ["75.0", "50.0"]
    (_, raw) = raw_table("made", rows[:1])
    assert raw["row"] == ["0", "fact", "12/0.1/last: 1, 1, 0.5"]
    assert read_rows(tmp_path / "none") == []
