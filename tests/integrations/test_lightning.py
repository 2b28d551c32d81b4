"""Lightning at its pinned version: the step is the engine's, records reach no hook, and a checkpoint keeps counting."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpulr.errors import InvalidArgument, StepError
from tests.support import small_job

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
LOSS = nn.CrossEntropyLoss(reduction="none")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def module() -> Any:
    """Made here: what is imported when tests are collected, every process of a test run pays for."""
    from lightning import LightningModule

    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = small_job.model(), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any) -> torch.Tensor:
            raise AssertionError("records must not get here")

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch)

        def validation_step(self, batch: Any) -> None:
            self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    return Own()


def private(**more: Any) -> Any:
    from dpulr.integrations.lightning import PrivateFit

    settings = {"mechanism": "gradient", "batch_size": 50, "steps": 10, "target_epsilon": 8.0, "target_delta": 1e-3, **more}
    return PrivateFit(small_job.data()[0], LOSS, **settings)


def trainer(folder: Path, *callbacks: Any, **more: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    from lightning import Trainer

    return Trainer(callbacks=list(callbacks), default_root_dir=folder, **quiet, **more)


def test_trainer_keeps_the_loop_and_the_engine_takes_the_steps(tmp_path: Path) -> None:
    own_module, own = module(), private()
    fit = trainer(tmp_path, own)
    fit.fit(own_module, own, DataLoader(small_job.data()[1], batch_size=50))
    assert fit.callback_metrics["accuracy"] > 0.8
    assert own.engine.steps_taken == 10 == fit.global_step
    assert fit.current_epoch == 3  # of 4 steps each, the last cut short
    spent = own.privacy_spent()
    assert spent.guarantee == "certified"
    assert float(fit.callback_metrics["privacy/epsilon"]) == pytest.approx(spent.epsilon)
    assert own_module.seen == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]  # numbers, no records
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**3)
    assert own_module.automatic_optimization
    with pytest.raises(AssertionError, match="records must not get here"):
        own_module.training_step(None)  # it is the module's own again


def test_a_checkpoint_goes_on_counting(tmp_path: Path) -> None:
    own = private()
    first = trainer(tmp_path, own, max_epochs=1)
    first.fit(module(), own)
    assert own.engine.steps_taken == 4
    first.save_checkpoint(tmp_path / "c.ckpt")
    again = private()
    second = trainer(tmp_path, again)
    second.fit(module(), again, ckpt_path=tmp_path / "c.ckpt", weights_only=False)
    assert again.engine.steps_taken == 10
    assert again.engine.run == own.engine.run
    assert again.privacy_spent().guarantee == "certified"


def test_what_it_can_not_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="no engine yet"):
        private().privacy_spent()
    own = private()
    with pytest.raises(InvalidArgument, match="accumulate_grad_batches"):
        trainer(tmp_path, own, accumulate_grad_batches=2).fit(module(), own)
