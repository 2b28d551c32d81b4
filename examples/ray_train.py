"""The same training on a Ray cluster: Ray Train starts the workers, and starts them again when one is lost.

What one learns: Ray Train joins its workers by torch.distributed, so the ten lines of the quickstart run on each of them, and each
takes its part of the records. The ledger lies where every node can reach it: a step is charged before a record is read, and a
restart counts what was charged. A checkpoint holds released values alone. `pip install "dpulr[scale]"`, then
`python examples/ray_train.py --workers 2`; on a cluster set RAY_ADDRESS, and give a folder that all nodes share.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer

import dpulr


def work(settings: dict[str, Any]) -> None:
    """What every worker does."""
    records, test = dpulr.data.load("mnist")
    model = dpulr.models.mlp(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = train.get_checkpoint()
    if saved is not None:  # the workers were started again, all of them
        with saved.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    engine = dpulr.PrivacyEngine(
        model,
        optimizer,
        records,
        torch.nn.CrossEntropyLoss(reduction="none"),
        batch_size=500,
        steps=settings["steps"],
        target_epsilon=1.0,
        ledger=Path(settings["folder"]) / "ledger.jsonl",
        rank_timeout=60.0,
    )
    for x, y in engine.batches():
        engine.step(x, y)
        if engine.steps_taken % settings["save_every"] == 0 or engine.steps_taken == engine.planned_steps:
            save(engine, dpulr.evaluate(model, test))


def save(engine: dpulr.PrivacyEngine, accuracy: float) -> None:
    """Rank 0 saves; all say where they are, as Ray Train wants it."""
    spent = engine.privacy_spent()
    said = {"steps": engine.steps_taken, "epsilon": spent.epsilon, "guarantee": spent.guarantee, "accuracy": accuracy}
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": engine.model.state_dict(), "optimizer": engine.optimizer.state_dict()}
        torch.save(state, Path(folder) / "state.pt")
        train.report(said, checkpoint=train.Checkpoint.from_directory(folder) if engine.ranks.rank == 0 else None)


def main(folder: Path, workers: int = 2, steps: int = 120, save_every: int = 20, failures: int = 3) -> train.Result:
    """Train in this folder; what Ray Train says of it."""
    folder = folder.resolve()
    if not ray.is_initialized():
        ray.init()
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(folder), "steps": steps, "save_every": save_every},
        scaling_config=train.ScalingConfig(num_workers=workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=train.RunConfig(
            name="training",
            storage_path=str(folder),
            failure_config=train.FailureConfig(max_failures=failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=1),
        ),
    )
    result = trainer.fit()
    print("done:", result.metrics)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    main(given.folder, given.workers, given.steps)
