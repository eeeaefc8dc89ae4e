"""The toy robot: its world is drawn as it is told, and the model that is trained is the one that is driven."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.toy_robot.judging import export, interval, reuse, success
from benchmarks.toy_robot.robot import Robot, Schedule, Shape, train
from benchmarks.toy_robot.tabletop import (
    CAMERAS,
    COLORS,
    HORIZON,
    SIDE,
    Tables,
    draw_hands,
    draw_shapes,
    draw_tables,
    drive,
    ends_at,
    patch_labels,
    wanted_actions,
    with_hands,
)

from vtx.runtime.api.load import load
from vtx.runtime.api.model import Model

SMALL = Shape(layers=3, hidden=32, ffn=48, heads=2, tower_layers=1, steps=3)


@pytest.fixture(scope="module")
def tables() -> Tables:
    return draw_tables(np.random.default_rng(0), 40)


@pytest.fixture(scope="module")
def robot() -> Robot:
    torch.set_num_threads(1)
    made = Robot(SMALL, 0)
    train(made, Schedule(steps=3, batch=4, draws=2, ks=(2, 3)), 0)
    return made


@pytest.fixture(scope="module")
def model(robot: Robot, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("toy")
    with load(export(robot.save(folder / "checkpoint"), folder / "bundle", (2, 3)), device="cpu", threads=1) as loaded:
        yield loaded


def test_each_shape_is_drawn_where_it_is_by_the_camera_that_sees_it(tables: Tables) -> None:
    pictures = draw_shapes(tables)
    paints, grounds = np.array([*COLORS.values()]), np.array([*CAMERAS.values()])
    for number, places in enumerate(tables.places):
        camera, at = places[:, 0].astype(int), (places % 1 * SIDE).astype(int)
        for shape in range(len(places)):
            found = pictures[number, camera[shape], at[shape, 1], at[shape, 0]]
            np.testing.assert_array_equal(found, paints[tables.colors[number, shape]])
        for side in set(range(2)) - {*camera}:
            assert (pictures[number, side] == grounds[side]).all()


def test_forms_are_drawn_apart_and_no_two_shapes_share_a_word(tables: Tables) -> None:
    for words in (tables.colors, tables.forms):
        assert all(len({*row}) == len(row) for row in words)
    place = np.array([[[0.5, 0.5], [1.25, 0.25], [1.75, 0.75]]], np.float32)
    drawn = [draw_shapes(Tables(place, np.zeros((1, 3), int), np.full((1, 3), form)))[0, 0] for form in range(3)]
    areas = [(each != 255).any(-1).sum() for each in drawn]
    assert all(abs(one - other).sum() > 5000 for one in drawn for other in drawn if one is not other), areas


def test_the_hand_changes_the_picture_of_the_camera_that_sees_it_alone(tables: Tables) -> None:
    shapes, hands = draw_shapes(tables), np.tile(np.array([0.4, 0.5], np.float32), (40, 1))
    here, there = with_hands(shapes, hands), with_hands(shapes, hands + 0.2)
    assert (here[:, 0] != there[:, 0]).any((1, 2, 3)).all()
    np.testing.assert_array_equal(here[:, 1], there[:, 1])
    assert (here[:, 0, SIDE // 2, int(0.4 * SIDE)] == 0).all()


def test_labels_of_patches_are_those_of_the_shapes_on_them(tables: Tables) -> None:
    names, centres = patch_labels(tables, 4)
    for number, places in enumerate(tables.places):
        for shape, (x, y) in enumerate(places):
            patch = int(x) * 16 + int(y * 4) * 4 + int(x % 1 * 4)
            wanted = [tables.colors[number, shape] + 1, tables.forms[number, shape] + 1]
            assert names[number, patch].tolist() == wanted
            middle = np.array([int(x) + (int(x % 1 * 4) + 0.5) / 4, (int(y * 4) + 0.5) / 4])
            np.testing.assert_allclose(centres[number, patch], (places[shape] - middle) * 4, atol=1e-5)


def test_who_knows_the_target_ends_on_it_and_who_drives_elsewhere_does_not(tables: Tables) -> None:
    starts = draw_hands(np.random.default_rng(1), tables)
    for shape in range(3):
        goals = tables.places[:, shape]
        ends = drive(tables, starts, lambda number, _c, _p, _t, hand, g=goals: wanted_actions(g[number], hand[None])[0])
        assert (ends_at(tables, ends) == shape).all()
    away = np.full((40, 2), 0.0, np.float32)
    still = drive(tables, away, lambda *_: np.zeros((HORIZON, 2), np.float32))
    assert (ends_at(tables, still) == -1).all()


def test_instructions_name_the_first_shape_and_pictures_are_drawn_anew(tables: Tables) -> None:
    seen = []

    def act(number: int, chunk: int, pictures: np.ndarray, text: str, hand: np.ndarray) -> np.ndarray:
        seen.append((number, chunk, pictures.copy(), text))
        return wanted_actions(tables.targets[number], hand[None])[0]

    drive(tables, np.tile(np.array([1.0, 0.0], np.float32), (40, 1)), act)
    assert [text for *_, text in seen[::3]] == [tables.instruction(number) for number in range(40)]
    assert not any(np.array_equal(seen[n][2], seen[n + 1][2]) for n in range(0, 120, 3))


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, 2, 3])
def test_the_bundle_acts_as_the_forward_pass_of_training(robot: Robot, model: Model, k: int | None) -> None:
    rng = np.random.default_rng(5)
    tables = draw_tables(rng, 1)
    hands, noise = draw_hands(rng, tables), rng.standard_normal((HORIZON, 2), np.float32)
    pictures, ids = with_hands(draw_shapes(tables), hands)[0], robot.ids[tables.colors[0, 0], tables.forms[0, 0]]
    found = model.act(dict(zip(CAMERAS, pictures, strict=True)), tables.instruction(0), hands[0], k=k, noise=noise)
    wanted = robot.act(pictures, ids, hands[0], noise, k) * robot.units.actions_std + robot.units.actions_mean
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    others = [robot.act(pictures, ids, hands[0], noise, other) for other in {None, 2, 3} - {k}]
    mine = robot.act(pictures, ids, hands[0], noise, k)
    assert min(np.abs(mine - other).max() for other in others) > 1e-4, "K changes what the expert reads"


def test_episodes_are_counted_and_unchanged_pictures_keep_their_tokens(model: Model, tmp_path: Path) -> None:
    cells = [success(model, 3, k, elsewhere=elsewhere) for k, elsewhere in ((None, False), (2, False), (None, True))]
    assert all(0 <= cell["reached"] + cell["other"] <= 3 for cell in cells)
    found = reuse(model.bundle.folder, 4)
    assert found["pictures"] == 24
    assert 8 <= found["encoded"] < 24
    assert found["compared"] > 0
    assert found["largest_difference"] < 1e-5


def test_an_interval_is_wide_where_seeds_differ_and_never_narrower_than_their_episodes_allow() -> None:
    assert [float(end) for end in interval([200, 200, 200], 200)] == [100, 99.4, 100]
    middle, low, high = map(float, interval([100, 150, 200], 200))
    assert middle == 75
    assert low < 25
    assert high == 100
