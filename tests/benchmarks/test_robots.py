"""The benchmark of robots' policies: turns of all sides, a table of their chunks, and what a chunk is measured with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import robots
from benchmarks.robot_work import CHUNK, ROBOTS, Pictures, chunks

SMOLVLA = ROBOTS["smolvla"]


def steps(monkeypatch: pytest.MonkeyPatch, work: Path, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["robots", *words, "--work", str(work), "--lerobot", "LEROBOT", "--rounds", "2"])
    robots.main()


def test_every_side_takes_its_turn_once_a_round_and_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[list[str]]()

    def run(*words: object) -> str:
        asked.append([*map(str, words)])
        seconds = 4.0 if len(asked) > 5 else 2.0
        return f"loading\n{json.dumps({'first': seconds, 'next': 1.0, 'rss': 100.0, 'how': 'int4'})}\n"

    monkeypatch.setattr(robots, "run", run)
    (tmp_path / "smolvla/bundle").mkdir(parents=True)
    steps(monkeypatch, tmp_path, "measure", "smolvla")
    once = [" ".join(words) for words in asked]
    assert len(once) == 10
    assert sorted(once[:5]) == sorted(once[5:])
    assert once[:5] != once[5:]
    assert [words[0] for words in asked].count("LEROBOT") == 2
    assert sum("--k" in words for words in asked) == 4
    steps(monkeypatch, tmp_path, "measure")
    assert len(asked) == 10, "a round was measured again, or a policy without a bundle"
    capsys.readouterr()
    steps(monkeypatch, tmp_path, "report")
    table = capsys.readouterr().out
    assert table.count("SmolVLA 450M") == 5
    assert table.count("3.00 (2.00 to 4.00)") == 5
    assert f"| {SMOLVLA.k} " in table
    assert "| LeRobot " in table


def test_the_next_chunk_has_the_pictures_of_the_first_and_another_state() -> None:
    seen = list[tuple[Pictures, Any, Any]]()

    def act(pictures: Pictures, state: np.ndarray, noise: np.ndarray) -> np.ndarray:
        seen.append((pictures, state, noise))
        return noise[:, : SMOLVLA.width]

    figures = chunks(SMOLVLA, act)
    warm, first, following = [{name: picture.tobytes() for name, picture in each.items()} for each, _, _ in seen]
    assert first == following != warm
    assert [*first] == [*SMOLVLA.cameras]
    assert len({state.tobytes() for _, state, _ in seen}) == 3
    assert len({noise.tobytes() for _, _, noise in seen}) == 1
    assert len(figures["actions"]) == CHUNK
    assert min(figures["first"], figures["next"], figures["rss"]) > 0


def test_norms_multiply_by_about_one_in_either_kind_of_decoder() -> None:
    of_llama = "model.vlm_with_expert.lm_expert.layers.0.input_layernorm.weight"
    of_gemma = "model.paligemma_with_expert.paligemma.model.language_model.norm.weight"
    of_tower = "model.paligemma_with_expert.paligemma.model.vision_tower.vision_model.post_layernorm.weight"
    assert [robots.distribution(name, (64,))[1] for name in (of_llama, of_gemma, of_tower)] == [1.0, 0.0, 1.0]
    assert robots.distribution("model.state_proj.weight", (960, 32))[0] == pytest.approx(32**-0.5)
