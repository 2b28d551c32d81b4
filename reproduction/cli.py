"""`dpulr reproduce`: the paper's tables and figures, run again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dpulr.runs.errors import UsageError

if TYPE_CHECKING:
    from dpulr.runs.training import Recipe
    from reproduction.many_runs import Setting, Watcher
    from reproduction.paper_runs import PaperRun

reproduce = typer.Typer(
    help="Run the paper's tables and figures again. What the results hold is not repeated, so a stopped command goes on.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Settings = Annotated[list[str] | None, typer.Option("--settings", help="Only these, such as 500:4; 500 means all of that kind.")]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ... of each setting.")]
Epochs = Annotated[int, typer.Option(min=1, help="Epochs of each run.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs side by side, one thread each; by default one a core.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="K, which the paper does not state.")]
Sigma = Annotated[float | None, typer.Option(help="Standard deviation of the injected noise, which the paper does not state.")]
Holdout = Annotated[int, typer.Option(min=0, help="For tuning: test on the last so many training records, train on the others.")]
Scaled = Annotated[bool, typer.Option("--scaled", help="Inputs of mean 0 and variance 1 instead of pixels in [0, 1].")]
Methods = Annotated[list[str] | None, typer.Option("--methods", help="Only dp-ulr, dp-sgd, hidden-direction or dp-sgd-tuned.")]
TorchStart = Annotated[bool, typer.Option("--torch-start", help="The initial weights of torch instead of He's.")]
Show = Annotated[bool, typer.Option("--show", help="Run nothing: print what the results hold.")]
Results = Annotated[Path, typer.Option(help="Folder of the results.")]
Images = Annotated[Path, typer.Option(help="Folder of the pictures.")]
_RESULTS, _IMAGES = Path("results"), Path("docs/images")

T = TypeVar("T")
R = TypeVar("R", bound="Setting")


@reproduce.command("table1")
def table1(
    settings: Settings = None,
    seeds: Seeds = 1,
    epochs: Epochs = 25,
    jobs: Jobs = None,
    repeats: Repeats = None,
    sigma: Sigma = None,
    holdout: Holdout = 0,
    methods: Methods = None,
    scaled: Scaled = False,
    torch_start: TorchStart = False,
    show: Show = False,
    results: Results = _RESULTS,
) -> None:
    """MNIST, 15 settings (batch:sigma0): DP-ULR and DP-SGD as the paper has them; hidden-direction and DP-SGD certified, tuned."""
    from reproduction import paper_tables as tables
    from reproduction.paper_runs import AS_LOADED

    chosen, wanted = _chosen(tables.SETTINGS, settings), _chosen({method: method for method in tables.METHODS}, methods)
    ours = {"rescale": AS_LOADED if scaled else None, "start": "torch" if torch_start else None}
    own = _given(repeats=repeats, sigma=sigma, holdout=holdout, **ours)
    file, certified = results / "table1.json", results / "mnist-table.json"

    def paper(seed: int) -> list[PaperRun]:
        return [run for c in chosen for run in tables.table1_runs(*c, seed, epochs, **own) if run.method in wanted]

    def proved(seed: int) -> list[Recipe]:
        if holdout:  # tuning is for the paper's methods
            return []
        both = [zip(tables.METHODS[2:], tables.certified_runs(*c, seed, epochs), strict=True) for c in chosen]
        return [run for pair in both for name, run in pair if name in wanted]

    _run(paper, seeds, file, jobs, show)
    _run(proved, seeds, certified, jobs, show)
    print("Accuracies in per cent, training / validation (seeds); certified ones on the validation records.")
    print(tables.table1(chosen, file, certified, seeds, epochs, **own))


@reproduce.command("model-size")
def model_size(
    settings: Settings = None,
    seeds: Seeds = 1,
    epochs: Epochs = 25,
    jobs: Jobs = None,
    repeats: Repeats = None,
    sigma: Sigma = None,
    show: Show = False,
    results: Results = _RESULTS,
) -> None:
    """MNIST, sigma0 = 8, three sizes of the MLP and three batch sizes (batch:model). Small at 64 is a run of table1."""
    from reproduction import paper_tables as tables

    chosen, own = _chosen(tables.SIZES, settings), _given(repeats=repeats, sigma=sigma)
    file = results / "table1.json"
    _run(lambda seed: [r for c in chosen for r in tables.model_size_runs(*c, seed, epochs, **own)], seeds, file, jobs, show)
    print("Accuracies in per cent, training / validation (seeds).")
    print(tables.model_size(chosen, file, seeds, epochs, **own))


@reproduce.command("repeats")
def repeats_study(
    settings: Settings = None,
    seeds: Seeds = 1,
    epochs: Epochs = 25,
    jobs: Jobs = None,
    sigma: Sigma = None,
    show: Show = False,
    results: Results = _RESULTS,
) -> None:
    """MNIST, DP-ULR with K = 4, 16, 64 (batch:sigma0): what the number of repeats does, which the paper does not state."""
    from reproduction import paper_tables as tables

    chosen, own = _chosen(tables.SETTINGS, settings or ["500:4"]), _given(sigma=sigma)
    file = results / "table1.json"
    runs = _run(lambda seed: [r for c in chosen for r in tables.repeats_runs(*c, seed, epochs, **own)], seeds, file, jobs, show)
    print(tables.listing(runs, file))


@reproduce.command("cifar")
def cifar(
    settings: Settings = None,
    seeds: Seeds = 1,
    epochs: Epochs = 25,
    jobs: Jobs = None,
    repeats: Repeats = None,
    sigma: Sigma = None,
    show: Show = False,
    results: Results = _RESULTS,
    images: Images = _IMAGES,
) -> None:
    """CIFAR-10, ResNet-5: DP-SGD (dp-sgd) and DP-ULR at q = 1/50, sigma0 = 5 (50:5), and so on. 4 to 10 minutes an epoch."""
    from reproduction import paper_figures as figures
    from reproduction import paper_tables as tables

    chosen = _chosen({label: label for label in ("dp-sgd", *tables.CIFAR)}, settings)
    own, file = _given(repeats=repeats, sigma=sigma), results / "cifar.json"
    runs = _run(lambda seed: [r for c in chosen for r in tables.cifar_runs(c, seed, epochs, **own)], seeds, file, jobs, show)
    figures.draw_cifar(file, 0, epochs, _ready(images / "paper-cifar.png"), **own)
    print(tables.listing(runs, file))
    print(images / "paper-cifar.png")


@reproduce.command("baselines")
def baselines(seeds: Seeds = 1, epochs: Epochs = 25, jobs: Jobs = None, show: Show = False, results: Results = _RESULTS) -> None:
    """MNIST, batches of 500: plain SGD and plain ULR without privacy; zeroth-order and hidden-direction, certified."""
    from reproduction import paper_tables as tables

    plain, certified = results / "table1.json", results / "mnist-table.json"
    _run(lambda seed: tables.plain_runs(seed, epochs), seeds, plain, jobs, show)
    _run(lambda seed: tables.forward_runs(seed, epochs), seeds, certified, jobs, show)
    print(tables.baselines(plain, certified, seeds, epochs))


@reproduce.command("figure-dynamics")
def figure_dynamics(
    seeds: Seeds = 1,
    epochs: Epochs = 25,
    jobs: Jobs = None,
    repeats: Repeats = None,
    sigma: Sigma = None,
    show: Show = False,
    results: Results = _RESULTS,
    images: Images = _IMAGES,
) -> None:
    """MNIST: accuracy and epsilon over the epochs, for three sample rates and sigma0 = 1, 4, 8. It shares the runs of table1."""
    from reproduction import paper_figures as figures

    own, file = _given(repeats=repeats, sigma=sigma), results / "table1.json"
    _run(lambda seed: figures.dynamics_runs(seed, epochs, **own), seeds, file, jobs, show)
    panels = figures.dynamics(file, 0, epochs, **own)
    _ready(results / "figure-dynamics.json").write_text(json.dumps(panels, indent=1) + "\n")
    figures.draw_dynamics(panels, _ready(images / "paper-dynamics.png"))
    print(images / "paper-dynamics.png")


@reproduce.command("figure-bound")
def figure_bound(results: Results = _RESULTS, images: Images = _IMAGES) -> None:
    """The cost of rejection: the ratio that the paper draws, and what it does to epsilon. Seconds."""
    from dataclasses import asdict

    from reproduction import figure_bound as bound

    points = bound.bound_points()
    _ready(results / "figure-bound.json").write_text(json.dumps([asdict(point) for point in points]) + "\n")
    bound.draw(points, str(_ready(images / "paper-bound.png")))
    print(images / "paper-bound.png")


# --- what they share ------------------------------------------------------------------------------------------------------
def _chosen(known: dict[str, T], wanted: Sequence[str] | None) -> list[T]:
    """The settings of these labels; a label's first part stands for all that begin with it."""
    if not wanted:
        return list(known.values())
    chosen: list[T] = []
    for text in (part for item in wanted for part in item.replace(",", " ").split()):
        hits = [value for label, value in known.items() if label == text or label.startswith(f"{text}:")]
        if not hits:
            raise UsageError(f"there is no setting {text!r}; there are {', '.join(known)}.")
        chosen += [value for value in hits if value not in chosen]
    return chosen


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _ready(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _run(runs_of: Callable[[int], Sequence[R]], seeds: int, file: Path, jobs: int | None, show: bool) -> list[R]:
    """All seeds of one setting after all settings of the seed before: a stopped command has the most settings."""
    from reproduction.many_runs import cores, run_all

    runs = [run for seed in range(seeds) for run in runs_of(seed)]
    if not show:
        with _watching() as watcher:
            run_all(runs, file, jobs=jobs or cores(), watcher=watcher)
    return runs


class _Lines:
    """A line a quarter of a run, and one when it has finished."""

    def __init__(self) -> None:
        self.quarters: dict[str, int] = {}

    def began(self, total: int, known: int) -> None:
        print(f"{total} runs, {known} of them known", file=sys.stderr, flush=True)

    def moved(self, title: str, share: float) -> None:
        quarter = int(4 * share)
        if self.quarters.get(title, 0) < quarter < 4:
            self.quarters[title] = quarter
            print(f"{title}: {25 * quarter} %", file=sys.stderr, flush=True)

    def done(self, result: dict[str, Any]) -> None:
        print(_line(result), file=sys.stderr, flush=True)


class _Bars(_Lines):
    """A bar for each run under way, and one for all."""

    def __init__(self, bars: Any) -> None:
        self.bars = bars
        self.tasks: dict[str, Any] = {}

    def began(self, total: int, known: int) -> None:
        self.all = self.bars.add_task("all runs", total=total, completed=known)

    def moved(self, title: str, share: float) -> None:
        if title not in self.tasks:
            self.tasks[title] = self.bars.add_task(title, total=1.0)
        self.bars.update(self.tasks[title], completed=share)

    def done(self, result: dict[str, Any]) -> None:
        from reproduction.many_runs import title

        task = self.tasks.pop(title(result["recipe"]), None)
        if task is not None:
            self.bars.remove_task(task)
        self.bars.advance(self.all)
        self.bars.console.print(_line(result), highlight=False)


@contextmanager
def _watching() -> Iterator[Watcher]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        yield _Bars(bars)


def _line(result: dict[str, Any]) -> str:
    from reproduction.many_runs import title

    return f"{title(result['recipe'])}: accuracy {result['test_accuracy']:.2%}, {result['seconds']:.0f} s"
