"""Sweeps that resume, the tables made of them, and the page they fill."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpulr import HiddenDirection
from dpulr.randomness import RandomSource
from dpulr.runs.training import Recipe
from reproduction import options, results_file, results_page, sweep, table


def test_a_sweep_runs_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Recipe] = []

    def run(recipe: Recipe) -> dict:
        runs.append(recipe)
        return {"recipe": recipe.describe(), "test_accuracy": 0.5, "epsilon": 1.0, "seconds": 1.0}

    monkeypatch.setattr(sweep, "run", run)
    file = tmp_path / "results.json"
    recipes = [Recipe(HiddenDirection(repeats=4), seed=seed, target_epsilon=0.8015866155080693) for seed in range(2)]
    sweep.sweep(recipes, file)
    stored = json.loads(file.read_text())
    del stored[0]["recipe"]["mechanism"]["blocks"]  # as if the option had not existed then
    file.write_text(json.dumps(stored))
    sweep.sweep([replace(recipe, target_epsilon=0.8015866155080694) for recipe in recipes], file)
    assert len(runs) == 2
    sweep.sweep([replace(recipe, epochs=float(recipe.epochs)) for recipe in recipes], file)
    assert len(runs) == 2
    sweep.sweep([replace(recipes[0], mechanism=HiddenDirection(repeats=4, blocks=2))], file)
    assert len(runs) == 3
    assert len(results_file.found(recipes, file)) == 2


def test_learning_rates_and_directions_follow_epsilon() -> None:
    assert table.HIDDEN.learning_rate(0.8) == 0.2
    assert 0.2 < table.HIDDEN.learning_rate(1.5) < 0.4
    assert [table.HIDDEN.mechanism(epsilon).repeats for epsilon in (0.5, 1.0, 18.6)] == [8, 16, 32]
    assert math.isclose(table.epsilon_of(500, 2), 0.917, abs_tol=0.002)


def test_the_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n")
    results_page.fill(page, {"two": "2", "one": "1"})
    assert page.read_text() == "a\n<!-- one -->\n1\n<!-- end -->\nb\n<!-- two -->\n2\n<!-- end -->\n"
    with pytest.raises(ValueError, match="one place for 'three'"):
        results_page.fill(page, {"three": "3"})


def test_views_move_each_image_by_at_most_two_pixels() -> None:
    images = torch.zeros(200, 1, 28, 28)
    images[:, 0, 10, 10] = 1
    moved = options.shifted(images, RandomSource(1).directions(torch.device("cpu")))
    places = moved.nonzero()[:, 2:] - 10
    assert moved.sum() == 200
    assert places.abs().max() == 2
    assert len(set(map(tuple, places.tolist()))) > 10


def test_every_option_makes_a_recipe() -> None:
    for members in options.variants().values():
        for variant in members.values():
            assert [recipe.holdout for recipe in options.recipes(*variant, 0)] == [10_000] * 3


def test_the_pages_hold_what_the_results_say(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = tmp_path / "paper.md"
    page.write_text((root / "docs/paper.md").read_text())
    results_page.fill(page, results_page.paper_parts(root / "results"))
    assert page.read_text() == (root / "docs/paper.md").read_text()
