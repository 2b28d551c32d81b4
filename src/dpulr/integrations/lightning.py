"""Lightning: a callback that owns the step. `Trainer` keeps epochs, validation, checkpoints, schedulers and loggers.

    private = PrivateFit(train, loss_fn, batch_size=500, epochs=5, target_epsilon=1.0)
    Trainer(callbacks=[private]).fit(module, private, val_loader)

`module.forward` is the model, `configure_optimizers` gives one optimizer. `training_step` is not called: no record reaches code
that might log it. What must not be logged: training losses, sizes of batches, gradients before the noise. The guarantee does not
cover them. What is logged here, `privacy/epsilon` and `privacy/steps`, is public. Validation data counts as public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as problem:
    raise ImportError("dpulr.integrations.lightning needs Lightning: pip install 'dpulr[lightning]'.") from problem

from dpulr.accounting import PrivacySpent
from dpulr.engine import PrivacyEngine
from dpulr.errors import InvalidArgument, StepError
from dpulr.parts.loops import Epochs


class PrivateFit(Callback):
    """The callback, and the training "loader" of `Trainer.fit`. Takes what `PrivacyEngine` takes, but for model and optimizer."""

    def __init__(self, dataset: Any, loss_fn: Callable[[Any, Any], Any], **settings: Any) -> None:
        self._dataset, self._loss_fn, self._settings = dataset, loss_fn, settings
        self._engine: PrivacyEngine | None = None
        self._epochs: Epochs | None = None
        self._batches: Any = None
        self._stored: dict[str, Any] | None = None
        self._automatic = True

    @property
    def engine(self) -> PrivacyEngine:
        """The engine, once `fit` has begun."""
        if self._engine is None:
            raise StepError("there is no engine yet: Trainer.fit(module, private) makes it.")
        return self._engine

    def privacy_spent(self) -> PrivacySpent:
        return self.engine.privacy_spent()

    # --- the loader: it hands out numbers, not records ------------------------------------------------------------------------
    def __iter__(self) -> Iterator[int]:
        assert self._epochs is not None, "give it to Trainer(callbacks=[...]) as well"
        self._batches = next(self._epochs, iter(()))
        yield from range(len(self._batches) if self._batches else 0)

    def __len__(self) -> int:
        return self.engine.steps_per_epoch

    # --- the callback ----------------------------------------------------------------------------------------------------------
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer)
        if self._engine is None:
            (optimizer,) = trainer.optimizers
            self._engine = PrivacyEngine(pl_module, optimizer, self._dataset, self._loss_fn, **self._settings)
            if self._stored is not None:  # Lightning has put back the weights itself
                now = {"model": pl_module.state_dict(), "optimizer": optimizer.state_dict()}
                self._engine.load_state_dict({**self._stored, **now})
        self._epochs = self._engine.epochs()
        self._automatic = pl_module.automatic_optimization
        pl_module.automatic_optimization = False
        vars(pl_module)["training_step"] = lambda batch, batch_idx: self._step(trainer)

    def _step(self, trainer: Trainer) -> None:
        engine = self.engine
        engine.step(*next(self._batches))
        _count(trainer)
        _schedule(trainer, "step", engine.steps_taken)
        if engine.steps_taken >= engine.planned_steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _schedule(trainer, "epoch", trainer.current_epoch + 1)
        spent = self.engine.privacy_spent()
        if spent.epsilon is not None:
            pl_module.log("privacy/epsilon", spent.epsilon)
        pl_module.log("privacy/steps", float(spent.steps))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vars(pl_module).pop("training_step", None)  # that of the class again
        pl_module.automatic_optimization = self._automatic

    def state_dict(self) -> dict[str, Any]:
        """What was spent: a checkpoint that is resumed goes on counting."""
        whole = {} if self._engine is None else self._engine.state_dict()
        return {name: whole[name] for name in ("ledger", "run", "reasons") if name in whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stored = state_dict or None


def _check(trainer: Trainer) -> None:
    if len(trainer.optimizers) != 1:
        raise InvalidArgument(f"configure_optimizers returned {len(trainer.optimizers)} optimizers; a private run has one.")
    if trainer.accumulate_grad_batches != 1:
        raise InvalidArgument("accumulate_grad_batches must be 1: a private batch may be as large as you like (memory_limit=).")
    if trainer.world_size > 1:
        raise InvalidArgument(
            "several processes are not supported under Lightning: use torchrun and PrivacyEngine (docs/scale.md)."
        )


def _count(trainer: Trainer) -> None:
    """A step, for `trainer.global_step`, which checkpoints go by. It reads one of the two, by who steps."""
    loop = trainer.fit_loop.epoch_loop
    for progress in (loop.manual_optimization.optim_step_progress, loop.automatic_optimization.optim_progress.optimizer.step):
        progress.increment_ready()
        progress.increment_completed()


def _schedule(trainer: Trainer, interval: str, count: int) -> None:
    """Manual optimisation leaves learning-rate schedulers to whoever steps."""
    for config in trainer.lr_scheduler_configs:
        if config.interval == interval and count % config.frequency == 0:
            scheduler: Any = config.scheduler
            if config.reduce_on_plateau:
                scheduler.step(trainer.callback_metrics[str(config.monitor)])
            else:
                scheduler.step()
