"""`dpulr plan`: what a setting costs, or which setting meets a budget, with train's defaults and train's layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpulr.cli.options import Sets, takes_settings
from dpulr.errors import UsageError
from dpulr.runs.settings import Settings
from dpulr.runs.values import keys_of

if TYPE_CHECKING:
    from dpulr.accounting.events import Release
    from dpulr.auto import Choice, Task
    from dpulr.solver import Solution

    MakeRelease = Callable[[float], Release]


@takes_settings
def plan(
    options: dict[str, Any],
    dataset_size: Annotated[int | None, typer.Option(help="Number of records. Default: that of the data set.")] = None,
    dims: Annotated[
        str | None, typer.Option(help="Dimensions of layers of equal weight, such as 16,16,16,10, instead of a model's own.")
    ] = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Leave out one of epsilon, noise, batch size, epochs and data set size: it is computed. Leave out more: they are what
    train takes, and the noise is computed, or epsilon if the noise is given. Leave out none: delta is computed."""
    from dpulr import solver

    settings = Settings.build(options=options, sets=sets or ())
    if settings.sampling != "poisson" or settings.insecure_noise_seed is not None:
        raise UsageError("shuffled batches, or a seed for the noise, leave no guarantee: there is no epsilon to plan with.")
    if settings.seconds is not None:
        raise UsageError("plan says how many seconds a number of epochs takes: give --epochs instead of --seconds.")
    if settings.min_dataset_size is not None:
        raise UsageError("plan takes the size of the data set for public: leave out --min-dataset-size.")
    said = {*options, *keys_of(sets or ())}
    how = _of_dims(settings, dims) if dims is not None else _of_model(settings, dataset_size)
    given = _completed(settings, said, dataset_size, how)
    delta = settings.target_delta if "target_delta" in said or None in given.values() else None
    found = solver.plan(mechanism=how.release, delta=delta, rejection_threshold=settings.rejection_threshold, **given)
    layers = _layers(how.release(found.noise_multiplier), found.noise_multiplier)
    beside = found.solved_for != "epsilon" and settings.epsilon_of_steps != settings.target_epsilon
    explained = how.explained(found)
    if as_json:
        chosen = {} if explained is None else {"chosen": {**asdict(explained[0]), "seconds": explained[1]}}
        budget = {"budget": settings.target_epsilon} if beside else {}
        print(json.dumps({**asdict(found), **budget, **layers, **chosen}, indent=2))
        return
    print(found.table())
    if beside:
        print(f"epsilon is that of the steps; noisy evaluations and a temperature have the rest of {settings.target_epsilon:g}")
    for name, values in layers.items():
        print(f"{name}: {', '.join(f'{value:.4g}' for value in values)}")
    if explained is not None:
        print(f"\n{explained[0].text()}")
        print(f"seconds {explained[1]:.0f}: {found.steps:,} steps, timed here on synthetic records; reading records comes on top.")


# --- what is given, and what is computed --------------------------------------------------------------------------------
def _completed(settings: Settings, said: set[str], dataset_size: int | None, how: How) -> dict[str, Any]:
    """The five quantities, None for the one to compute. `said`: settings that were given."""
    given: dict[str, Any] = {
        "epsilon": settings.epsilon_of_steps if "target_epsilon" in said else None,
        "noise_multiplier": settings.noise_multiplier,
        "batch_size": settings.batch_size if "batch_size" in said and settings.batch_size != "auto" else None,
        "epochs": settings.epochs if "epochs" in said or settings.steps is not None else None,
        "dataset_size": dataset_size,
    }
    if sum(value is None for value in given.values()) > 1:
        solved = _solved(given)
        defaults = {**_defaults(settings), "dataset_size": how.records, "batch_size": how.batch_size(dataset_size)}
        given = {name: None if name == solved else value or defaults[name] for name, value in given.items()}
        if solved != "dataset_size" and given["dataset_size"] is None:
            raise UsageError("with --dims, give --dataset-size too: no data set is read.")
    if settings.steps is not None:
        given["epochs"] = _epochs(settings.steps, given["batch_size"], given["dataset_size"])
    return given


def _solved(given: dict[str, Any]) -> str:
    """What to compute where several quantities are left out."""
    if given["noise_multiplier"] is None:
        return "noise_multiplier"
    if given["epsilon"] is None:
        return "epsilon"
    return next(name for name in ("epochs", "batch_size") if given[name] is None)


def _defaults(settings: Settings) -> dict[str, Any]:
    return {
        "epsilon": settings.epsilon_of_steps,
        "noise_multiplier": settings.noise_multiplier,
        "epochs": settings.epochs,
    }


def _epochs(steps: int, batch_size: int | None, dataset_size: int | None) -> float:
    from dpulr.plan import epochs_of

    if batch_size is None or dataset_size is None:
        raise UsageError("give --epochs instead of --steps where the batch size or the data set size is to be computed.")
    return epochs_of(steps, min(1.0, batch_size / dataset_size))


# --- what a step releases -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class How:
    """By what a plan is made: what a step releases, the task as far as it is known, the records if there is a data set."""

    release: MakeRelease
    task: Task
    records: int | None = None

    def batch_size(self, records: int | None) -> int | None:
        """That of "auto"."""
        from dpulr.auto import batch_size_for

        size = records or self.records
        return None if size is None else batch_size_for(replace(self.task, records=size))

    def explained(self, found: Solution) -> tuple[Choice, float] | None:
        """What "auto" chooses beside it, and the seconds that it takes here."""
        return None


@dataclass(frozen=True)
class OfModel(How):
    """As train has it."""

    settings: Settings = field(default_factory=Settings)
    train: Any = None
    why: dict[str, str] = field(default_factory=dict)

    def explained(self, found: Solution) -> tuple[Choice, float]:
        from dpulr.auto import choose
        from dpulr.runs.training import expected_seconds

        task = replace(
            self.task, records=found.dataset_size, epsilon=found.epsilon, delta=found.delta, epochs=None, steps=found.steps
        )
        repeats = self.settings.repeats if isinstance(self.settings.repeats, int) else None
        choice = choose(task, batch_size=found.batch_size, repeats=repeats)
        size, noise = min(found.batch_size, len(self.train)), found.noise_multiplier
        settings, choice = replace(self.settings, repeats=choice.repeats), replace(choice, why=self.why | choice.why)
        return choice, expected_seconds(settings, self.train, batch_size=size, steps=found.steps, noise_multiplier=noise)


def _of_model(settings: Settings, dataset_size: int | None) -> OfModel:
    """As train has it: the model's layers and their weights; and the size of the data set."""
    from dpulr.runs.loading import load_data
    from dpulr.runs.training import outline_of

    train, _ = load_data(settings)
    outline = outline_of(settings, train, dataset_size)
    if not outline.release(1.0).certified:
        raise UsageError(f"{settings.mechanism} has no certified epsilon to plan with (docs/accounting.md has its nominal one).")
    if "repeats" in outline.choice.why:
        settings = replace(settings, repeats=outline.choice.repeats)
    return OfModel(outline.release, outline.task, outline.task.records, settings, train, outline.choice.why)


def _of_dims(settings: Settings, dims: str) -> How:
    """Without a model, a data set or torch: for the mechanisms that the accountant knows by name."""
    from dpulr.accounting.shortcuts import release_maker
    from dpulr.auto import Layer, Task

    try:
        sizes = [int(part) for part in dims.replace(",", " ").split()]
    except ValueError as problem:
        raise UsageError(f"--dims takes whole numbers, such as 16,16,16,10, not {dims!r}.") from problem
    layers = tuple(Layer(1, size) for size in sizes)  # their inputs are not known
    task = Task(settings.mechanism, 1, layers, settings.epsilon_of_steps, settings.target_delta, settings.epochs, settings.steps)
    if settings.mechanism != "hidden-direction":
        return How(release_maker(settings.mechanism), task)
    repeats = settings.repeats if isinstance(settings.repeats, int) else 8
    return How(release_maker(settings.mechanism, dims=sizes, repeats=repeats), task)


def _layers(release: Release, noise_multiplier: float) -> dict[str, list[float]]:
    """Dimensions, weights and repeats of a release that has layers."""
    sites = getattr(release, "sites", ())
    if not sites:
        return {}
    exact = getattr(release, "gaussian", ())
    return {
        "dims": [site.dim for site in sites],
        "weights": [noise_multiplier / site.noise_ratio for site in sites],
        "repeats": [site.repeats for site in sites],
        **({"weight of the exact part": [noise_multiplier / ratio for ratio in exact]} if exact else {}),
    }
