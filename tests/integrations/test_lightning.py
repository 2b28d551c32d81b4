"""Lightning at its pinned version: the step is the engine's, records reach no hook, and a checkpoint keeps counting."""

from __future__ import annotations

import runpy
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

lightning = pytest.importorskip("lightning")

from dpulr.integrations.lightning import PrivateFit  # noqa: E402

LOSS = nn.CrossEntropyLoss(reduction="none")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Module(lightning.LightningModule):
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


def private(**more: Any) -> PrivateFit:
    settings = {"mechanism": "gradient", "batch_size": 50, "steps": 10, "target_epsilon": 8.0, "target_delta": 1e-3, **more}
    return PrivateFit(small_job.data()[0], LOSS, **settings)


def trainer(folder: Path, *callbacks: Any, **more: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(callbacks=list(callbacks), default_root_dir=folder, **quiet, **more)


def test_trainer_keeps_the_loop_and_the_engine_takes_the_steps(tmp_path: Path) -> None:
    module, own = Module(), private()
    fit = trainer(tmp_path, own)
    fit.fit(module, own, DataLoader(small_job.data()[1], batch_size=50))
    assert fit.callback_metrics["accuracy"] > 0.8
    assert own.engine.steps_taken == 10 == fit.global_step
    assert fit.current_epoch == 3  # of 4 steps each, the last cut short
    spent = own.privacy_spent()
    assert spent.guarantee == "certified"
    assert float(fit.callback_metrics["privacy/epsilon"]) == pytest.approx(spent.epsilon)
    assert module.seen == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]  # numbers, no records
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**3)
    assert module.automatic_optimization
    with pytest.raises(AssertionError, match="records must not get here"):
        module.training_step(None)  # it is the module's own again


def test_a_checkpoint_goes_on_counting(tmp_path: Path) -> None:
    own = private()
    first = trainer(tmp_path, own, max_epochs=1)
    first.fit(Module(), own)
    assert own.engine.steps_taken == 4
    first.save_checkpoint(tmp_path / "c.ckpt")
    again = private()
    second = trainer(tmp_path, again)
    second.fit(Module(), again, ckpt_path=tmp_path / "c.ckpt", weights_only=False)
    assert again.engine.steps_taken == 10
    assert again.engine.run == own.engine.run
    assert again.privacy_spent().guarantee == "certified"


def test_what_it_can_not_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="no engine yet"):
        private().privacy_spent()
    own = private()
    with pytest.raises(InvalidArgument, match="accumulate_grad_batches"):
        trainer(tmp_path, own, accumulate_grad_batches=2).fit(Module(), own)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lightning_mnist.py"))["main"]
    accuracy, own = main(steps=3, enable_progress_bar=False, enable_model_summary=False)
    assert 0 <= accuracy <= 1
    assert own.engine.steps_taken == 3
    assert "differential privacy with epsilon" in capsys.readouterr().out
