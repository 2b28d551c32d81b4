"""Private selection: a random number of runs with random settings, the best one released, within one epsilon (docs/tune.md).

The whole search is charged before its first run. How many runs there are, and with which settings, is drawn once, in secret, and
written down before the first; a run that was interrupted begins again, one that is finished stays. Until the end everything lies in
a folder that is named as private, and is removed then: what the other runs found is covered by no guarantee.
"""

from __future__ import annotations

import multiprocessing
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dpulr import __version__
from dpulr.accounting.events import Charge, from_dict, to_dict
from dpulr.accounting.rounding import up
from dpulr.accounting.selection import RandomRuns, SearchCost, search_cost
from dpulr.errors import PrivacyRefusal, RunError, UsageError
from dpulr.files import read_json, replace_json, sync_folder
from dpulr.mechanisms.base import noised
from dpulr.private_scores import HeldOut
from dpulr.randomness import RandomSource
from dpulr.read_ahead import end_with_parent
from dpulr.runs import checkpoint
from dpulr.runs.evaluation import make_evaluation
from dpulr.runs.folder import CONFIG, RESULT, SEARCH, locked
from dpulr.runs.loading import make_model
from dpulr.runs.process import Stop
from dpulr.runs.settings import Settings
from dpulr.runs.space import Search, SearchPlan, parts, plan_search, with_noise
from dpulr.runs.training import Training
from dpulr.scores import score

PRIVATE, DRAWN = "PRIVATE-unreleased", "drawn.json"
Say = Callable[[str], None]


def tune(
    space: Mapping[str, Sequence[Any]],
    *,
    folder: Path | str,
    runs: float = 10.0,
    eta: float = 0.0,
    score_on: str = "holdout",
    jobs: int = 1,
    say: Say = lambda text: None,
    **settings: Any,
) -> dict[str, Any]:
    """Choose settings on private data: about `runs` runs, each with values drawn from `space`; the best one is released.

    `settings` are those of `dpulr train`; `target_epsilon` is the budget of the whole search. A run is scored on held-out private
    records (`score_on="holdout"`, `holdout=` of them), with noise, or on a public test part ("test"). Returns what result.json
    holds; the model lies beside it, and `dpulr.runs.load(folder)` loads it. A folder with an unfinished search goes on.
    """
    place = Path(folder)
    if not (place / SEARCH).exists():
        begin(Search(Settings.build(options=settings), space, runs, eta, score_on), place, say)  # type: ignore[arg-type]
    return finish(place, jobs=jobs, say=say)


def describe(plan: SearchPlan) -> list[str]:
    """What a search costs, in sentences."""
    cost, law = plan.cost, plan.search.law
    settings = len(plan.search.candidates)
    shared = [
        f"One run: epsilon {up(cost.run)}. The search: {up(cost.total - cost.run)} more. Total: epsilon {up(cost.total)} at delta "
        f"{cost.delta:g}, whatever the number of runs turns out to be.",
        f"{settings} settings; {law.mean:.3g} runs on average, at most {law.quantile(0.9)} in nine of ten searches, "
        f"{law.quantile(0.99)} in 99 of 100. The best setting is among them with probability {1 - law.miss(1 / settings):.2f}"
        + (f", one of the best quarter with {1 - law.miss(0.25):.2f}." if settings > 7 else "."),
        f"Noise multipliers: {_range(plan.noise)}. Trained on {plan.training_records:,} records.",
    ]
    if plan.score_noise is None:
        return [*shared, "Scored on the test part, which must be public."]
    points = 100 * plan.score_noise / plan.held_out_records
    return [
        *shared,
        f"Scored on {plan.held_out_records:,} held-out private records: right answers with noise of deviation "
        f"{plan.score_noise:.3g} ({points:.2g} points of accuracy). These records pay epsilon {up(cost.scoring)}.",
    ]


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if high - low < 1e-9 else f"{low:.4g} to {high:.4g}"


# --- the beginning ----------------------------------------------------------------------------------------------------------
def begin(search: Search, folder: Path, say: Say = lambda text: None) -> SearchPlan:
    """Plan a search, charge it, and draw in secret what it will run. Nothing is trained yet."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty.")
    plan = plan_search(search)
    for line in describe(plan):
        say(line)
    folder.mkdir(parents=True, exist_ok=True)
    private = folder / PRIVATE
    private.mkdir(mode=0o700)
    rng = RandomSource().numpy("search")
    number = search.law.quantile(float(rng.random()))
    choices = [int(choice) for choice in rng.integers(len(search.candidates), size=number)]
    replace_json(private / DRAWN, {"private": True, "runs": number, "choices": choices})
    replace_json(
        folder / SEARCH,
        {
            "version": __version__,
            "search": search.to_dict(),
            "runs_with": [
                with_noise(settings, noise).to_dict() for settings, noise in zip(plan.candidates, plan.noise, strict=True)
            ],
            "score_noise": plan.score_noise,
            "gamma": search.law.gamma,
            "delta": plan.cost.delta,
            "charged": [to_dict(charge) for charge in dict.fromkeys(plan.charges)],
            "training_records": plan.training_records,
            "held_out_records": plan.held_out_records,
            "id": secrets.token_hex(8),
        },
    )
    sync_folder(folder)
    return plan


# --- the runs ---------------------------------------------------------------------------------------------------------------
def finish(folder: Path, *, jobs: int = 1, say: Say = lambda text: None) -> dict[str, Any]:
    """Make the runs that are missing, release the best one, and forget the others."""
    if not (folder / SEARCH).is_file():
        raise UsageError(f"{folder} is not a search: it has no {SEARCH}.")
    with locked(folder), Stop():
        if (folder / RESULT).exists():
            return dict(read_json(folder / RESULT))
        choices = _drawn(folder)
        missing = [run for run in range(len(choices)) if not _file(folder, run).exists()]
        say("searching; nothing is shown before the end. Stop it at any time; 'dpulr tune --resume' goes on")
        if jobs > 1 and len(missing) > 1:
            _side_by_side(folder, missing, jobs)
        else:
            for run in missing:
                one_run(str(folder), run)
        return _release(folder, len(choices))


def _side_by_side(folder: Path, missing: Sequence[int], jobs: int) -> None:
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        begun = [pool.submit(one_run, str(folder), run) for run in missing]
        try:
            for done in as_completed(begun):
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def one_run(folder: str, run: int) -> None:
    """Train with the settings that were drawn for this run, score it, and write both down at once."""
    import torch

    torch.set_num_threads(1)
    place, about = Path(folder), read_json(Path(folder) / SEARCH)
    search, choice = Search.from_dict(about["search"]), _drawn(place)[run]
    settings = _settings(about, choice)
    train, scored, _ = parts(search)
    training = Training(settings, train, make_model(settings))
    if to_dict(Charge(training.engine.plan.event, training.engine.planned_steps)) not in about["charged"]:
        raise PrivacyRefusal("a run would release something else than was charged: the data or the program has changed since.")
    for _ in training.steps():
        pass
    if training.engine.reasons:
        raise PrivacyRefusal(f"a run has lost its guarantee, and the search with it: {training.engine.reasons[0]}.")
    value = _score(training.model, scored, about["score_noise"])
    state = {"private": True, "score": value, "choice": choice, "tie": secrets.randbits(53)}
    checkpoint.write(_file(place, run), training.model.state_dict(), state)


def _score(model: Any, scored: Any, noise: float | None) -> float:
    """The number of right answers, with noise; on public records, the share of them."""
    if noise is None:
        return float(score(model, scored).accuracy)
    import torch

    count = torch.tensor([float(HeldOut(model, scored).right_answers())], dtype=torch.float64)
    return float(noised(count, RandomSource().noise(1).draw(), noise))


def _settings(about: Mapping[str, Any], choice: int) -> Settings:
    """Those that a run of this candidate trains with."""
    return Settings.build(about["runs_with"][choice])


# --- the end ----------------------------------------------------------------------------------------------------------------
def _release(folder: Path, runs: int) -> dict[str, Any]:
    about = read_json(folder / SEARCH)
    search = Search.from_dict(about["search"])
    states = [checkpoint.read(_file(folder, run))[1] for run in range(runs)]
    best = max(range(runs), key=lambda run: (states[run]["score"], states[run]["tie"]))
    choice = int(states[best]["choice"])
    settings, law = _settings(about, choice), RandomRuns(search.eta, about["gamma"])
    cost = search_cost([[from_dict(charge)] for charge in about["charged"]], law, about["delta"], about["score_noise"])
    tensors, _ = checkpoint.read(_file(folder, best))
    model = make_model(settings)
    model.load_state_dict(tensors)
    _, _, test = parts(search)
    held_out = about["held_out_records"]
    result = {
        "search": about["id"],
        "chosen": search.values_of(choice),
        "score": states[best]["score"] / held_out if held_out else states[best]["score"],
        "score_on": search.score_on,
        "guarantee": "certified",
        "epsilon": cost.total,
        "delta": cost.delta,
        "run_epsilon": cost.run,
        "search_epsilon": cost.total - cost.run,
        "mean_runs": search.law.mean,
        "statement": statement(search, cost),
        "settings": settings.to_dict(),
        **({} if test is None else make_evaluation(settings, test).figures(model)),
        "version": __version__,
    }
    config = settings.to_json()
    state = {"run": about["id"], "steps": 0, "guarantee": "certified", "epsilon": cost.total, "delta": cost.delta}
    checkpoint.write(folder / checkpoint.MODEL, tensors, {**state, "version": __version__})
    (folder / CONFIG).write_bytes(config)
    replace_json(folder / RESULT, result)
    shutil.rmtree(folder / PRIVATE)
    sync_folder(folder)
    return result


def statement(search: Search, cost: SearchCost) -> str:
    """What is promised, as a sentence."""
    unit = "person with all of their records" if search.base.unit is not None else "record"
    held_out = "that was trained on, or held out to score runs, while the other of the two parts stays as it is"
    where = held_out if cost.score_noise is not None else "that was trained on"
    return (
        f"(epsilon, delta)-differential privacy with epsilon = {up(cost.total)} and delta = {cost.delta:g}, for adding or removing "
        f"one {unit} {where}: of the released model, its settings and its score together. They are the best of a random number of "
        f"runs ({search.law.mean:.3g} on average; one run alone costs {up(cost.run)}). Assumed: Poisson sampling, secret "
        "randomness from the operating system, settings fixed before the data was seen but for the search, a loss of each record "
        "that depends on that record alone; that the number of runs and what the others found stay secret, and that no "
        "interruption depends on records. Not covered: the time that the search takes, which tells about the number of runs."
    )


def _drawn(folder: Path) -> list[int]:
    try:
        return [int(choice) for choice in read_json(folder / PRIVATE / DRAWN)["choices"]]
    except (RunError, KeyError, TypeError, ValueError) as problem:
        raise RunError(f"{folder / PRIVATE / DRAWN} is missing or damaged: what was drawn can't be drawn again.") from problem


def _file(folder: Path, run: int) -> Path:
    return folder / PRIVATE / f"run-{run:05d}.safetensors"
