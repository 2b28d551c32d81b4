"""The data set and the models that come with the package, and its public names."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

import dpulr
from dpulr.data import idx


def test_mnist_is_whole() -> None:
    train, test = dpulr.data.load("mnist")
    (x, y), (x_test, y_test) = train.tensors, test.tensors
    assert x.shape == (60_000, 1, 28, 28)
    assert x_test.shape == (10_000, 1, 28, 28)
    assert x.dtype == torch.float32
    torch.testing.assert_close(torch.stack([x.min(), x.max()]), torch.tensor([-1 / 3, 3.0]))  # constants, not measured
    assert y[:5].tolist() == [5, 0, 4, 1, 9]
    assert y_test[:5].tolist() == [7, 2, 1, 0, 4]
    assert y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def test_an_unknown_data_set_is_named() -> None:
    with pytest.raises(ValueError, match="'letters'"):
        dpulr.data.load("letters")


def test_damaged_files_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    monkeypatch.setattr(idx, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz .* is damaged"):
        idx.load_mnist()


def test_idx_files() -> None:
    raw = b"\x00\x00\x08\x02" + struct.pack(">2I", 2, 3) + bytes(range(6))
    assert idx.parse(raw, "a file").tolist() == [[0, 1, 2], [3, 4, 5]]
    for broken in (b"", b"\x00\x00\x0d\x01" + bytes(8), raw[:-1], raw + b"x"):
        with pytest.raises(ValueError, match="a file"):
            idx.parse(broken, "a file")


def test_mlp() -> None:
    model = dpulr.models.mlp()
    assert [tuple(m.weight.shape) for m in model if isinstance(m, nn.Linear)] == [(128, 784), (64, 128), (32, 64), (10, 32)]
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(ValueError, match=r"sizes .* \[3\]"):
        dpulr.models.mlp([3])


def test_resnet5() -> None:
    model = dpulr.models.resnet5()
    x = torch.randn(2, 3, 32, 32)
    assert model(x).shape == (2, 10)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [8, 16, 32, 32]
    with torch.no_grad():  # the residual: without the fourth convolution the third's output goes through
        model.conv4.weight.zero_()
        model.conv4.bias.zero_()
        h = model.relu(model.conv3(model.relu(model.conv2(model.relu(model.conv1(x))))))
        torch.testing.assert_close(model(x), model.linear(model.pool(h).flatten(1)))


@pytest.mark.parametrize("make", [dpulr.models.mlp, dpulr.models.resnet5])
def test_seeds_fix_the_weights_and_nothing_else(make: object) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second, other = make(seed=5), make(seed=5), make(seed=6)  # type: ignore[operator]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(iter(first.parameters())), next(iter(other.parameters())))


def test_public_names_exist() -> None:
    for name in dpulr.__all__:
        assert getattr(dpulr, name) is not None
    assert set(dpulr.__all__) <= set(dir(dpulr))
    with pytest.raises(AttributeError, match="'nothing'"):
        dpulr.nothing  # noqa: B018


def test_neurons_start_with_a_window_of_the_picture() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(784, 200)
    before = layer.weight.detach().clone()
    dpulr.models.into_windows(layer, 7)
    pictures = layer.weight.detach().view(200, 28, 28)
    assert torch.equal((pictures != 0).sum((1, 2)), torch.full((200,), 49))
    for axis in (1, 2):
        seen = (pictures != 0).any(axis)
        assert torch.equal(seen.sum(1), torch.full((200,), 7))
        assert len(seen.float().argmax(1).unique()) == 22  # every place
    torch.testing.assert_close(layer.weight[layer.weight != 0], 4 * before[layer.weight != 0])
    same = [dpulr.models.spiking(seed=3, window=5)[1].weight for _ in range(2)]
    assert torch.equal(*same)
    for inputs, window in ((783, 7), (784, 29), (784, 0)):
        with pytest.raises(ValueError, match="no such part of a square picture"):
            dpulr.models.into_windows(nn.Linear(inputs, 2), window)
