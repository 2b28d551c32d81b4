"""The studies: one table of what each runs and prints. `python -m reproduction --list` shows it with an estimate of the hours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reproduction import (
    auto_fit,
    auto_judge,
    beyond,
    certified,
    hybrid,
    losses,
    options,
    paper_figures,
    paper_tables,
    public_features,
    senders,
    texts,
)
from reproduction.certified import EPOCHS
from reproduction.pages import table
from reproduction.results_file import found
from reproduction.run import Run

Changes = dict[str, Any]
ALL = ("all",)


@dataclass(frozen=True)
class Choice:
    """What of a study is asked for: labels of its settings, seeds 0, 1, ..., epochs, and changes to the settings of its runs."""

    labels: tuple[str, ...]
    seeds: int
    epochs: int
    changes: Changes = field(default_factory=dict)


Stages = Callable[[Choice], Iterator[list[Run]]]
Show = Callable[[Choice], str]
OfOne = Callable[[str, int, Choice], list[Run]]
"""The runs of one setting and seed."""


@dataclass(frozen=True)
class Study:
    """`stages` gives lists of runs; a list may depend on the results of those before it. `show` prints what there is."""

    name: str
    about: str
    labels: tuple[str, ...]
    stages: Stages
    show: Show
    epochs: int = EPOCHS
    usual: tuple[str, ...] = ()
    changeable: bool = False
    """Whether the settings of its runs may be changed: those where the paper leaves something open."""
    before: Callable[[int], None] | None = None
    """What is no list of runs, for so many seeds."""

    def choice(self, seeds: int = 1) -> Choice:
        return Choice(self.usual or self.labels, seeds, self.epochs)

    def runs(self, choice: Choice) -> list[Run]:
        return [run for stage in self.stages(choice) for run in stage]


def by_seed(runs_of: OfOne) -> Stages:
    """All settings with one seed before the next seed: a stopped command has the most settings."""

    def stages(choice: Choice) -> Iterator[list[Run]]:
        yield [run for seed in range(choice.seeds) for label in choice.labels for run in runs_of(label, seed, choice)]

    return stages


def listed(runs_of: OfOne) -> Show:
    """A line per setting."""
    return lambda choice: paper_tables.listing([run for stage in by_seed(runs_of)(choice) for run in stage])


# --- what each runs -------------------------------------------------------------------------------------------------------
def _table1(label: str, seed: int, choice: Choice) -> list[Run]:
    setting = paper_tables.SETTINGS[label]
    runs = paper_tables.table1_runs(*setting, seed, choice.epochs, **choice.changes)
    return runs if choice.changes else [*runs, *paper_tables.certified_runs(*setting, seed, choice.epochs)]


def _dynamics(label: str, seed: int, choice: Choice) -> list[Run]:
    return paper_tables.table1_runs(*paper_tables.SETTINGS[label], seed, choice.epochs, **choice.changes)


def _model_size(label: str, seed: int, choice: Choice) -> list[Run]:
    return paper_tables.model_size_runs(*paper_tables.SIZES[label], seed, choice.epochs, **choice.changes)


def _repeats(label: str, seed: int, choice: Choice) -> list[Run]:
    return paper_tables.repeats_runs(*paper_tables.SETTINGS[label], seed, choice.epochs, **choice.changes)


def _cifar(label: str, seed: int, choice: Choice) -> list[Run]:
    return paper_tables.cifar_runs(label, seed, choice.epochs, **choice.changes)


def _results(label: str, seed: int, choice: Choice) -> list[Run]:
    dataset, _, row = label.partition(":")
    epsilon = certified.comparisons()[dataset].epsilons[int(row)]
    return [certified.certified_run(dataset, method, epsilon, seed) for method in (certified.HIDDEN, certified.DPSGD)]


def _backward(label: str, seed: int, choice: Choice) -> list[Run]:
    dataset, _, row = label.partition(":")
    chosen = certified.comparisons()[dataset]
    methods = [method for method in (certified.HYBRID, certified.GRADIENT) if method in chosen.methods]
    return [certified.certified_run(dataset, method, chosen.epsilons[int(row)], seed) for method in methods]


# --- what each prints -----------------------------------------------------------------------------------------------------
def _settings(choice: Choice, known: Mapping[str, Any]) -> list[Any]:
    return [known[label] for label in choice.labels]


def _show_table1(choice: Choice) -> str:
    chosen = _settings(choice, paper_tables.SETTINGS)
    return paper_tables.table1(chosen, choice.seeds, choice.epochs, certified=not choice.changes, **choice.changes)


def _show_model_size(choice: Choice) -> str:
    return paper_tables.model_size(_settings(choice, paper_tables.SIZES), choice.seeds, choice.epochs, **choice.changes)


def _show_results(choice: Choice) -> str:
    datasets = dict.fromkeys(label.partition(":")[0] for label in choice.labels)
    return "\n\n".join(f"{dataset}\n\n{certified.markdown(dataset, choice.seeds)}" for dataset in datasets)


def _show_gaussian(choice: Choice) -> str:
    results = found(run for seed in range(choice.seeds) for run in certified.gaussian_runs(seed))
    return table(["gaussian, antithetic, epsilon 2.6"], [[certified.accuracy(results)]])


# --- the table ------------------------------------------------------------------------------------------------------------
def studies() -> dict[str, Study]:
    """By name. A row: name, what it is; labels of its settings, its runs, what it prints."""
    settings, dynamics = tuple(paper_tables.SETTINGS), tuple(f"{b}:{s:g}" for b in (64, 200, 500) for s in paper_figures.NOISES)
    rows = tuple(f"{name}:{i}" for name, one in certified.comparisons().items() for i in range(len(one.epsilons)))
    # fmt: off
    every = [
        Study("table1", "MNIST, batch:sigma0. DP-ULR and DP-SGD as in the paper; certified methods",
              settings, by_seed(_table1), _show_table1, changeable=True),
        Study("figure-dynamics", "accuracy and epsilon by epoch; shares the runs of table1",
              dynamics, by_seed(_dynamics), _show_table1, changeable=True),
        Study("model-size", "MNIST, batch:model, sigma0 = 8, three MLPs",
              tuple(paper_tables.SIZES), by_seed(_model_size), _show_model_size, changeable=True),
        Study("repeats", "MNIST, batch:sigma0. DP-ULR with K = 4, 16, 64",
              settings, by_seed(_repeats), listed(_repeats), changeable=True, usual=("64:4", "500:4")),
        Study("readings", "MNIST, held-out records: what the paper leaves open, at two settings of table 1",
              (*paper_tables.READINGS, *paper_tables.EXACT),
              by_seed(lambda label, seed, choice: paper_tables.reading_runs(label, seed, choice.epochs)),
              lambda choice: paper_tables.readings(choice.seeds, choice.epochs)),
        Study("cifar", "CIFAR-10, ResNet-5: DP-SGD, and DP-ULR at 1/q:sigma0",
              tuple(paper_tables.CIFAR), by_seed(_cifar), listed(_cifar), changeable=True),
        Study("baselines", "MNIST: SGD and ULR without privacy; zeroth-order and hidden-direction, certified",
              ALL, by_seed(lambda _, seed, choice: paper_tables.baseline_runs(seed, choice.epochs)),
              lambda choice: paper_tables.baselines(choice.seeds, choice.epochs)),
        Study("results", "hidden-direction beside DP-SGD, dataset:row of docs/results.md",
              rows, by_seed(_results), _show_results),
        Study("gradient", "the columns of docs/results.md with a backward pass, dataset:row",
              rows, by_seed(_backward), _show_results),
        Study("hybrid", "MNIST, a network with a box in its middle: hidden directions everywhere, or before the box only",
              ALL, lambda choice: hybrid.stages(choice.seeds), lambda choice: hybrid.markdown(choice.seeds), epochs=2),
        Study("beyond", "networks that backpropagation can't train: spikes, signs, boxes, a 0-1 loss",
              tuple(beyond.ROWS), lambda choice: beyond.stages(choice.labels, choice.seeds),
              lambda choice: beyond.markdown(choice.labels, choice.seeds), epochs=8),
        Study("losses", "what becomes of a loss (docs/losses.md): two small problems, and MNIST at epsilon 1",
              ALL, by_seed(lambda _, seed, __: losses.mnist_runs(seed)),
              lambda choice: f"{losses.small_table()}\n\n{losses.mnist_table(choice.seeds)}", epochs=10, before=losses.small),
        Study("senders", "SpamAssassin e-mails: records, or their senders, as what is protected",
              ALL, lambda choice: senders.stages(choice.seeds), lambda choice: senders.markdown(choice.seeds), epochs=20),
        Study("texts", "MiniLM on film reviews, data:what is trained:method",
              texts.LABELS, lambda choice: texts.stages(choice.labels, choice.seeds),
              lambda choice: texts.markdown(choice.labels, choice.seeds), epochs=2,
              usual=tuple(label for label in texts.LABELS if label.startswith("tomatoes"))),
        Study("gaussian", "MNIST, gaussian at epsilon 2.6",
              ALL, by_seed(lambda _, seed, __: certified.gaussian_runs(seed)), _show_gaussian),
        Study("options", "what the options of hidden-direction buy, on held-out records",
              tuple(options.variants()), lambda choice: options.stages(choice.labels, choice.seeds),
              lambda choice: options.markdown(choice.seeds), epochs=5),
        Study("features", "a private linear layer on features from public models, data:epsilon; settings by auto",
              tuple(public_features.ROWS), by_seed(lambda label, seed, _: [public_features.ROWS[label].run(seed)]),
              lambda choice: public_features.markdown(choice.seeds), epochs=15),
        Study("auto-judge",
              "auto beside untuned Opacus and the best of a grid, data:epsilon:epochs, on data that it was not fitted to",
              tuple(cell.label for cell in auto_judge.every_cell()), lambda choice: auto_judge.stages(choice.labels),
              lambda _: auto_judge.markdown(), epochs=10),
        Study("auto-fit", "what the constants of dpulr.auto are fitted to: Fashion-MNIST and synthetic tables, held-out records",
              ("gradient", "hidden-direction"),
              lambda choice: (stage for name in choice.labels for stage in auto_fit.stages(auto_fit.cells_of(name))),
              lambda _: auto_fit.markdown(), epochs=10),
    ]
    # fmt: on
    return {study.name: study for study in every}


OTHERS = {
    "figure-bound": ("0.1", "the cost of rejection: the ratio that the paper draws, and what it does to epsilon"),
    "epsilons": ("0.0", "the paper's 15 settings: its nominal epsilon beside certified ones"),
    "audit": ("0.5", "the sweep of docs/audit.md"),
    "bugs": ("0.1", "mechanisms with planted bugs: the audit must refute each"),
    "errata": ("0.0", "where the paper's privacy claim fails, in numbers"),
    "pages": ("0.0", "fill the tables and pictures of docs/ from the results (--check: compare only)"),
}


def chosen(study: Study, wanted: list[str]) -> Choice:
    """The settings of these labels; the first part of a label stands for all that begin with it."""
    picked: list[str] = []
    for text in (part for item in wanted for part in item.split(",")):
        hits = [label for label in study.labels if label == text or label.startswith(f"{text}:")]
        if not hits:
            raise ValueError(f"there is no setting {text!r}; there are {', '.join(study.labels)}.")
        picked += [label for label in hits if label not in picked]
    return replace(study.choice(), labels=tuple(picked))
