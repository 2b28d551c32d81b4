"""Frozen layers computed once per record: the same bits beside any others; bounded, on disk, refused where it would be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpulr
from dpulr.errors import DataError, InvalidArgument, ModelRefused

LOSS = nn.CrossEntropyLoss(reduction="none")


def _sequential() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def _cnn() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(body.requires_grad_(False), nn.Linear(16, 3)).eval()


class _Residual(nn.Module):
    """Sizes of the batch, positions, and a mask for each pair, behind a trained layer and before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(5, 8)
        self.frozen, self.trained, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        for part in (self.words, self.places, self.frozen):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = (x[:, :, None] == x[:, None, :]).to(torch.float32) @ torch.ones(5, 40)
        h = self.frozen(self.words(x)) + self.places(torch.arange(x.shape[1]))
        h = h + torch.tanh(self.trained(h)) * pairs.mean(2, keepdim=True) + pairs[:, :, :8]
        out: Tensor = self.head(h.reshape(x.shape[0], 5, 8).mean(1))
        return out


def _encoder() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from dpulr.language import TextClassifier

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=50, max_position_embeddings=16
    )
    encoder = transformers.BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    encoder.encoder.layer[2].requires_grad_(True)
    return TextClassifier(encoder, 16, 3).eval()


def _records(kind: str, size: int = 70) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    if kind == "encoder":
        words = torch.randint(1, 50, (size, 1, 7), generator=generator)
        lengths = torch.randint(2, 8, (size, 1, 1), generator=generator)
        x = torch.cat([words, (torch.arange(7) < lengths).long()], dim=1)
    elif kind == "residual":
        x = torch.randint(0, 20, (size, 5), generator=generator)
    else:
        x = torch.randn(*{"sequential": (size, 6), "cnn": (size, 1, 8, 8)}[kind], generator=generator)
    return TensorDataset(x, torch.arange(size) % 3)


def _released(model: nn.Module, data: Any, mechanism: Any, *, rate: float, batch: int) -> Tensor:
    """What one step with a fixed seed releases."""
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        data,
        LOSS,
        mechanism=mechanism,
        sample_rate=rate,
        expected_batch_size=batch,
        noise_multiplier=1.0,
        steps=1,
        insecure_noise_seed=3,
    )
    found: list[Tensor] = []
    engine.on_release(lambda release: found.append(release.values))
    for records in engine.batches():
        engine.step(*records)
    return found[0]


MODELS = {"sequential": _sequential, "cnn": _cnn, "residual": _Residual, "encoder": _encoder}

KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "encoder")) for kind in MODELS]


def _made(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[kind]()


def _columns(dataset: Any) -> list[Tensor]:
    return [torch.from_numpy(np.array(c)) for c in (dataset.inputs if isinstance(dataset.inputs, tuple) else [dataset.inputs])]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_gives_the_models_losses_and_gradients(kind: str) -> None:
    model, data = _made(kind), _records(kind)
    kept = dpulr.keep_frozen(model, data)
    x, y = data.tensors
    whole, rest = LOSS(model(x), y), LOSS(kept.model(*_columns(kept.dataset)), y)
    torch.testing.assert_close(rest, whole)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(p) for p in kept.model.parameters() if p.requires_grad} == {id(p) for p in trained}  # the very layers
    for own, other in zip(*(torch.autograd.grad(losses.sum(), trained) for losses in (rest, whole)), strict=True):
        torch.testing.assert_close(own, other)
    assert not any(p.requires_grad for p in kept._prefix.parameters())


@pytest.mark.parametrize("mechanism", ["gradient", "hidden-direction", dpulr.ZerothOrder.dpzero()])
def test_a_step_on_what_is_kept_releases_what_a_step_on_the_records_does(mechanism: Any) -> None:
    released = []
    for keep in (True, False):
        model, data = _made("sequential"), _records("sequential")
        parts = dpulr.keep_frozen(model, data) if keep else None
        trained, records = (model, data) if parts is None else (parts.model, parts.dataset)
        released.append(_released(trained, records, mechanism, rate=0.5, batch=35))
    torch.testing.assert_close(released[0], released[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_a_record_has_the_same_bits_beside_any_others(kind: str) -> None:
    data = _records(kind)
    kept = dpulr.keep_frozen(_made(kind), data)
    some = torch.tensor([69, 3, 40])
    alone = kept.also(TensorDataset(*(t[some] for t in data.tensors)))
    for own, other in zip(_columns(kept.dataset), _columns(alone), strict=True):
        assert torch.equal(own[some], other)


def test_where_no_size_agrees_each_record_has_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpulr.model.each_record.agreeing", lambda *_: 0)
    model, data = _made("sequential"), _records("sequential")
    sizes = []
    model[0].register_forward_hook(lambda *args: sizes.append(len(args[2])))
    with pytest.warns(UserWarning, match="record by record"):
        kept = dpulr.keep_frozen(model, data)
    assert sizes[-70:] == [1] * 70
    torch.testing.assert_close(kept.model(*_columns(kept.dataset)), model(data.tensors[0]))


def test_a_mask_for_each_pair_is_made_again_rather_than_kept() -> None:
    kept = dpulr.keep_frozen(_made("residual"), _records("residual"))
    columns = _columns(kept.dataset)
    assert (5, 8) in [tuple(column.shape[1:]) for column in columns]  # what the frozen layers give
    assert sum(column[0].numel() for column in columns) < 2 * 40  # not the 200 numbers that are made of a text's pairs


class _Items(Dataset[Any]):
    """Record 3 can't be read, record 5 has another shape; with `noise`, items are augmented."""

    def __init__(self, data: TensorDataset, noise: float = 0.0) -> None:
        self.data, self.noise = data, noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        x, y = self.data[row]
        if self.noise:
            return x + self.noise * torch.rand(()), y
        if row == 3:
            raise OSError("the disk says no")
        return (x[:2] if row == 5 else x), y


def test_a_record_that_cannot_be_computed_is_nan_and_changes_no_other() -> None:
    data = _records("sequential")
    model = nn.Sequential(dpulr.BlackBox(_refusing, output_shape=(6,)), _made("sequential"))
    whole = dpulr.keep_frozen(model, data)
    data.tensors[0][7] = 1_000.0
    kept = dpulr.keep_frozen(model, _Items(data))
    (own,), (other,) = _columns(kept.dataset), _columns(whole.dataset)
    missing = torch.tensor([3, 5, 7])
    assert bool(own[missing].isnan().all())
    rest = torch.tensor([i for i in range(70) if i not in (3, 5, 7)])
    assert torch.equal(own[rest], other[rest])


def _refusing(x: np.ndarray) -> np.ndarray:
    if x.max() > 100:
        raise ValueError("out of range")
    return x


@pytest.mark.parametrize("mechanism", ["gradient", dpulr.ZerothOrder.dpzero()])
def test_nothing_of_a_missing_record_is_in_a_release(mechanism: Any) -> None:
    released = []
    for broken in (True, False):
        data = _records("sequential")
        model = nn.Sequential(dpulr.BlackBox(_refusing, output_shape=(6,)), _made("sequential"))
        if broken:
            data.tensors[0][69] = 1_000.0
        else:
            data = TensorDataset(*(t[:69] for t in data.tensors))
        kept = dpulr.keep_frozen(model, data)
        released.append(_released(kept.model, kept.dataset, mechanism, rate=1.0, batch=70))
    torch.testing.assert_close(released[0], released[1], rtol=0, atol=1e-4)


def test_files_are_mapped_and_computed_once(tmp_path: Path) -> None:
    model, data, place = _made("cnn"), _records("cnn"), tmp_path / "kept"
    first = dpulr.keep_frozen(model, data, path=place)
    assert isinstance(first.dataset.inputs, np.memmap)
    assert (place.stat().st_mode & 0o077) == 0
    written = (place / "0.npy").stat().st_mtime_ns
    again = dpulr.keep_frozen(_made("cnn"), data, path=place)
    assert (place / "0.npy").stat().st_mtime_ns == written
    assert np.array_equal(again.dataset.inputs, first.dataset.inputs)
    assert np.array_equal(again.dataset.targets, data.tensors[1].numpy())
    with torch.no_grad():
        model[0][0].weight.mul_(2)
    other = dpulr.keep_frozen(model, data, path=place)  # other weights: computed again
    torch.testing.assert_close(other.model(*_columns(other.dataset)), model(data.tensors[0]))
    assert (place / "0.npy").stat().st_mtime_ns != written


def test_a_stopped_computation_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    dpulr.keep_frozen(_made("cnn"), _records("cnn"), path=tmp_path)
    (tmp_path / "about.json").unlink()
    np.load(tmp_path / "0.npy", mmap_mode="r+")[:] = 7
    kept = dpulr.keep_frozen(_made("cnn"), _records("cnn"), path=tmp_path)
    assert not bool((_columns(kept.dataset)[0] == 7).any())


def test_more_than_the_limit_is_refused_before_anything_is_computed() -> None:
    with pytest.raises(InvalidArgument, match=r"70 records takes .* more than limit=1,000 bytes"):
        dpulr.keep_frozen(_made("cnn"), _records("cnn"), limit=1_000)


def test_frozen_layers_that_draw_random_numbers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.Dropout(0.5), nn.Linear(8, 3))
    with pytest.raises(ModelRefused, match="draw random numbers"):
        dpulr.keep_frozen(model, _records("sequential"))
    kept = dpulr.keep_frozen(model.eval(), _records("sequential"))
    model.train()
    with pytest.raises(InvalidArgument, match="another mode"):
        kept.also(_records("sequential"))


def test_dropout_behind_the_first_trained_layer_stays() -> None:
    model = nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    kept = dpulr.keep_frozen(model, _records("sequential"))
    (column,) = _columns(kept.dataset)
    assert not torch.equal(kept.model(column), kept.model(column))


def test_frozen_layers_that_mix_records_are_refused() -> None:
    with pytest.raises(ModelRefused, match="BatchNorm2d"):
        dpulr.keep_frozen(_made("cnn").train(), _records("cnn"))


def test_augmented_items_are_refused() -> None:
    with pytest.raises(DataError, match="change from one reading to the next"):
        dpulr.keep_frozen(_made("sequential"), _Items(_records("sequential"), noise=0.1))


def test_nothing_frozen_in_front_is_said() -> None:
    with pytest.raises(ModelRefused, match="nothing to compute once"):
        dpulr.keep_frozen(_made("sequential").requires_grad_(True), _records("sequential"))


def test_a_model_that_returns_something_else_is_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _made("sequential")

        def forward(self, x: Tensor) -> Any:
            return {"logits": self.inner(x)}

    with pytest.raises(ModelRefused, match="returns dict, and must return a tensor"):
        dpulr.keep_frozen(Two(), _records("sequential"))
