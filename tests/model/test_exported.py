"""Models that torch.fx can't take apart, as programs of torch.export: transformers as they are, layers that return several tensors,
parameters beside layers. Every site, moved by the program, gives the losses of the model with literally moved weights.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpulr
from dpulr.errors import ModelRefused
from dpulr.model.batches import call_model, row
from dpulr.model.exported_layers import Each, Packed
from dpulr.model.forward import Forward
from dpulr.model.prepare import prepare
from dpulr.model.replay import TracedPasses
from tests.support import zoo as models
from tests.support.core import CPU, LOSS, engine, train

zoo: Any = pytest.importorskip("benchmarks.zoo", exc_type=ImportError)
QUICK = ["BERT"]


def prepared(model: nn.Module, loss_fn: Any, example: Any, **settings: Any) -> Forward:
    """No warning is given: neither of this package nor of torch's inner workings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return prepare(model, loss_fn, example, CPU, **settings)


def assert_sites_are_literal(model: nn.Module, loss_fn: Any, forward: Forward, batch: Any) -> None:
    """Move each site's weights, for each record differently; compare with passes of the model itself, record by record."""
    torch.manual_seed(3)
    records = len(batch[1])
    with torch.inference_mode():
        (clean,) = forward.clean(*batch)
        for i, site in enumerate(forward.sites):
            delta = 0.3 * torch.randn(1, records, site.full_dim) / site.full_dim**0.5
            found = forward.losses(clean, i, site.moved(clean.calls[i], delta))[0]
            for r in range(records):
                parameters = list(site.parameters.values())
                parts = delta[0, r].split([p.numel() for p in parameters])
                before = [p.clone() for p in parameters]
                for p, part in zip(parameters, parts, strict=True):
                    p += part.view_as(p)
                inputs, targets = row(batch, r)
                expected = loss_fn(call_model(model, inputs), targets)[0]
                for p, own in zip(parameters, before, strict=True):
                    p.copy_(own)
                torch.testing.assert_close(
                    found[r], expected, rtol=2e-4, atol=2e-5, msg=lambda text, site=site: f"{site.label}: {text}"
                )


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in zoo.MODELS])
def test_transformers_have_a_site_per_layer_and_replay_gives_their_losses(name: str) -> None:
    case = zoo.MODELS[name]
    model = case.make()
    forward = prepared(model, case.loss_fn, case.batch(1), space="weight")
    assert isinstance(forward.passes, TracedPasses)
    owners = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    assert len(forward.sites) >= len(owners)
    assert {p for site in forward.sites for p in site.parameters.values()} == {p for p in model.parameters() if p.requires_grad}
    assert_sites_are_literal(model, case.loss_fn, forward, case.batch(2))


class Sequences(nn.Module):
    """Layers that return tuples, one of them with records along its second axis, and parameters beside layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.start = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(1, 1, 4))
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4 + 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.start.expand(x.shape[0], -1, -1), x.view(-1, 2, 4) * self.scale], dim=1)
        x, (last, _) = self.lstm(x)
        x, _ = self.gru(x)
        x, _ = self.attention(x, x, x)
        return self.head(torch.cat([x.mean(1), last[-1]], dim=1))


def test_recurrent_layers_attention_and_parameters_beside_them_are_sites_of_their_own() -> None:
    model = Sequences()
    batch = torch.randn(3, 8), torch.tensor([0, 1, 2])
    forward = prepared(model, LOSS, row(batch, 0), space="weight")
    assert isinstance(forward.passes, TracedPasses)
    assert [type(site.layer.module) for site in forward.sites if site.name != "head"].count(Packed) == 3
    assert sum(isinstance(site.layer.module, Each) for site in forward.sites) == 2
    assert len(forward.sites) == 6
    assert_sites_are_literal(model, LOSS, forward, batch)


def test_an_encoder_of_torch_has_a_site_per_layer() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (2, 8)), encoder, nn.Flatten(), nn.Linear(16, 3)).eval()
    batch = torch.randn(2, 16), torch.tensor([0, 1])
    forward = prepared(model, LOSS, row(batch, 0), space="weight")
    assert len(forward.sites) == 6
    assert_sites_are_literal(model, LOSS, forward, batch)


class ReadsItsMask(nn.Module):
    """As Hugging Face's models: a mask is looked at, but not in an export. `mixes`: what an export captures mixes records."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.mixes = nn.Linear(6, 5), nn.Linear(5, 3), mixes

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        if torch.compiler.is_exporting() or not bool(mask.all()):
            x = x * mask
        return self.second(x - x.mean(0) if self.mixes and torch.compiler.is_exporting() else x)


def masked(records: int) -> Any:
    return {"x": torch.rand(records, 6), "mask": torch.ones(records, 5, dtype=torch.int64)}, torch.zeros(records, dtype=torch.int64)


def test_a_mask_that_is_read_does_not_part_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dpulr"):
        forward = prepared(ReadsItsMask(), LOSS, masked(1))
    assert isinstance(forward.passes, TracedPasses)
    assert any("torch.export, because the forward pass" in record.message for record in caplog.records)


@pytest.mark.parametrize("make", [models.ShapeBranch, models.ItemAssignment])
def test_what_fx_cannot_trace_is_exported(make: Callable[[], nn.Module]) -> None:
    model = make()
    batch = torch.randn(2, 6), torch.tensor([0, 1])
    forward = prepared(model, LOSS, row(batch, 0), space="weight")
    assert isinstance(forward.passes, TracedPasses)
    assert_sites_are_literal(model, LOSS, forward, batch)


def test_an_export_that_mixes_records_is_not_used() -> None:
    with pytest.warns(UserWarning, match="one by one"):
        assert prepare(ReadsItsMask(mixes=True), LOSS, masked(1), CPU).recordwise


def test_a_model_that_mixes_records_is_refused_also_by_an_export() -> None:
    class Mixes(Sequences):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    with pytest.raises(ModelRefused, match="mixes records"):
        prepare(Mixes(), LOSS, (torch.rand(1, 8), torch.zeros(1, dtype=torch.int64)), CPU)


class Counts(ReadsItsMask):
    """Writes into a buffer, which an export would hand out as a further output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls.fill_(1.0)
        return super().forward(x, mask)


def test_a_model_that_writes_state_is_run_as_it_is() -> None:
    with pytest.warns(UserWarning, match="one by one"):
        assert prepare(Counts(), LOSS, masked(1), CPU).recordwise


class Encoded(Dataset[Any]):
    """Records as a tokenizer of Hugging Face gives them."""

    def __init__(self, case: Any) -> None:
        self.inputs, self.targets = case.batch(20)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        from transformers import BatchEncoding

        return BatchEncoding({name: values[index] for name, values in self.inputs.items()}), self.targets[index]


@pytest.mark.filterwarnings("ignore:the data set has")
@pytest.mark.parametrize("make", [dpulr.HiddenDirection, dpulr.ZerothOrder.dpzero], ids=["hidden-direction", "dpzero"])
@pytest.mark.slow
def test_a_tokenizers_records_train_a_lora(make: Callable[[], Any]) -> None:
    peft = pytest.importorskip("peft")
    case = zoo.MODELS["BERT"]
    torch.manual_seed(0)
    model = peft.get_peft_model(case.make(), peft.LoraConfig(r=2, target_modules=["query", "value"])).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in model.parameters()]
    private = engine(
        model,
        Encoded(case),
        loss_fn=case.loss_fn,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        mechanism=make(),
        batch_size=5,
        steps=2,
    )
    assert not private.forward.recordwise
    train(private)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]
    assert private.privacy_spent().guarantee == "certified"
