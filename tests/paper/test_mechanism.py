"""The `paper` mechanism against a slow, literal transcription of Algorithm 1, its controller, its remedies, its settings."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpulr
from dpulr.model.prepare import prepare
from dpulr.paper.covariance import Covariance
from dpulr.paper.mechanism import BoundPaper
from dpulr.randomness import GaussianNoise, RandomSource

LOSS = nn.CrossEntropyLoss(reduction="none")
CPU = torch.device("cpu")
SIGMA0 = 0.9


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 4, 2),
        nn.Tanh(),
        nn.Conv1d(4, 2, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def images() -> nn.Module:
    """Convolutions whose gradients are smaller than their patches, so that they are made record by record."""
    return nn.Sequential(
        nn.Linear(5, 36),
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(2, 2, (3, 2), stride=(1, 2), dilation=(2, 1), padding=(2, 0), groups=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


class Residual(nn.Module):
    """A branch beside the first layer, and one around the last."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.left(x).tanh() + self.right(x)
        return self.out(x) + x


def data(records: int = 12, dtype: torch.dtype = torch.float64) -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(records, 5, dtype=dtype), torch.arange(records) % 3)


def engine_for(model: nn.Module, records: TensorDataset, settings: dpulr.Paper, **more: Any) -> dpulr.PrivacyEngine:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"batch_size": 6, "steps": 1, "insecure_noise_seed": 12} | more
    return dpulr.PrivacyEngine(model, optimizer, records, LOSS, mechanism=settings, **options)


# --- Algorithm 1, literally -----------------------------------------------------------------------------------------------
class Literal:
    """One step of Algorithm 1, record by record, layer by layer and draw by draw, with dense Jacobians by autograd."""

    def __init__(self, model: nn.Module, records: TensorDataset, settings: dpulr.Paper, *, rate: float, threshold: int) -> None:
        self.model, self.records, self.settings = model, records, settings
        source = RandomSource(12)
        self.directions, self.noise = source.numpy("directions"), source.numpy("noise")
        self.layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        coins, size = source.numpy("batches"), -1
        while size < threshold:
            size = coins.binomial(len(records), rate)
        self.batch = [records[row] for row in coins.choice(len(records), size, replace=False, shuffle=False)]

    def run(self, x: Tensor, y: Tensor, at: dict[nn.Module, Tensor]) -> tuple[Tensor, dict[nn.Module, tuple[Tensor, Tensor]]]:
        """The loss with noise added to the outputs of some layers; and every layer's output before it, with its input."""
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            seen[module] = ([*args, *kwargs.values()][0].detach().clone(), output)
            return output + at[module].view_as(output) if module in at else output

        handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in self.layers]
        loss = LOSS(self.model(x.unsqueeze(0)), y.unsqueeze(0))[0]
        for handle in handles:
            handle.remove()
        return loss, seen

    def jacobian(self, layer: nn.Module, x: Tensor) -> Tensor:
        """D v of a layer with respect to its parameters, at its input x: one row an output."""
        output = layer(x).flatten()
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(v, list(layer.parameters()), retain_graph=True)]) for v in output
        ]
        return torch.stack(rows)

    def covariance(self, layer: nn.Module) -> Tensor:
        """sum over the batch of L_0^2 J^T J, in full."""
        total = 0
        for x, y in self.batch:
            loss, seen = self.run(x, y, {})
            jacobian = self.jacobian(layer, seen[layer][0])
            total = total + loss.item() ** 2 * jacobian.t() @ jacobian
        return total

    def sigma(self, layer: nn.Module, std: float, repeats: int, clip: float) -> tuple[float, bool]:
        """The controller: eq:sigma, at most the given sigma; or the given one, with extra noise."""
        most = self.settings.sigma
        if std == 0:
            return most, False
        values = torch.linalg.eigvalsh(self.covariance(layer))
        if self.settings.remedy == "extra-noise" or values[0] < 1e-10 * values[-1]:
            return most, True
        return min(most, math.sqrt(values[0].item() / (repeats * clip**2 * std**2))), False

    def normals(self, layer: nn.Module, repeats: int) -> Tensor:
        width = self.run(*self.batch[0], {})[1][layer][1].numel()
        return torch.from_numpy(self.directions.standard_normal((repeats, len(self.batch), width), np.float32)).double()

    def gradient(self, layer: nn.Module, estimates: list[Tensor], std: float, repeats: int, clip: float) -> Tensor:
        """Clip each record, add up, add the extra noise; not yet divided."""
        total = sum(g / max(1, g.norm().item() / clip) for g in estimates)
        sigma, extra = self.sigma(layer, std, repeats, clip)
        xi = torch.from_numpy(self.noise.standard_normal(len(total)))  # the stream goes on, layer by layer
        if extra:
            values, q = torch.linalg.eigh(self.covariance(layer) / sigma**2)
            lacking = (std**2 * clip**2 - values / repeats).clamp_min(0)
            total = total + q @ torch.diag(lacking.sqrt()) @ q.t() @ xi
        return total

    def step(self, stds: Any, all_repeats: Any = 3, clips: Any = 0.7) -> list[Tensor]:
        """The sums over the batch, one flat vector a layer. Settings are numbers, or one for each layer."""
        sums = []
        if self.settings.simultaneous:
            return self.step_together(stds, all_repeats, clips)
        own = zip(*(v if isinstance(v, tuple) else (v,) * len(self.layers) for v in (stds, all_repeats, clips)), strict=True)
        for layer, (std, repeats, clip) in zip(self.layers, own, strict=True):
            sigma, _ = self.sigma(layer, std, repeats, clip)
            z = sigma * self.normals(layer, repeats)
            estimates = []
            for i, (x, y) in enumerate(self.batch):
                jacobian = self.jacobian(layer, self.run(x, y, {})[1][layer][0])
                proxies = [
                    jacobian.t() @ (z[k, i] * self.run(x, y, {layer: z[k, i]})[0].detach()) / sigma**2 for k in range(repeats)
                ]
                estimates.append(sum(proxies) / repeats)
            sums.append(self.gradient(layer, estimates, std, repeats, clip))
        return sums

    def step_together(self, std: float, repeats: int, clip: float) -> list[Tensor]:
        """ULR: noise at all layers in one pass, with the Jacobians at the noisy inputs."""
        sigmas = {layer: self.sigma(layer, std, repeats, clip)[0] for layer in self.layers}
        z = {layer: sigmas[layer] * self.normals(layer, repeats) for layer in self.layers}
        estimates: dict[nn.Module, list[Tensor]] = {layer: [] for layer in self.layers}
        for i, (x, y) in enumerate(self.batch):
            means: dict[nn.Module, Any] = dict.fromkeys(self.layers, 0)
            for k in range(repeats):
                loss, seen = self.run(x, y, {layer: z[layer][k, i] for layer in self.layers})
                for layer in self.layers:
                    jacobian = self.jacobian(layer, seen[layer][0])
                    means[layer] = means[layer] + jacobian.t() @ (z[layer][k, i] * loss.item()) / (sigmas[layer] ** 2 * repeats)
            for layer in self.layers:
                estimates[layer].append(means[layer])
        return [self.gradient(layer, estimates[layer], std, repeats, clip) for layer in self.layers]


def check_step(make: Any, settings: dpulr.Paper, std: float, *, threshold: int = 0) -> dpulr.PrivacyEngine:
    torch.manual_seed(0)
    model, records = make().double(), data()
    literal = Literal(model, records, settings, rate=0.5, threshold=threshold)
    expected = [total / (threshold or 6) for total in literal.step(std)]
    engine = engine_for(model, records, settings, noise_multiplier=std, rejection_threshold=threshold)
    before = [p.detach().clone() for p in model.parameters()]
    for batch in engine.batches():
        engine.step(*batch)
    for layer, wanted in zip(literal.layers, expected, strict=True):
        found = torch.cat([p.grad.flatten() for p in layer.parameters()])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - parameter.grad)
    return engine


BASE: dict[str, Any] = {"repeats": 3, "max_grad_norm": 0.7, "sigma": 0.4}


@pytest.mark.parametrize("make", [mlp, convolutions, images, Residual])
@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.parametrize("remedy", ["auto", "extra-noise"])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_a_step_is_algorithm_1(make: Any, simultaneous: bool, remedy: Any) -> None:
    settings = dpulr.Paper(**{**BASE, "sigma": 1.5}, remedy=remedy, simultaneous=simultaneous)
    engine = check_step(make, settings, SIGMA0, threshold=7)
    sigmas = [control.sigma for control in engine.bound.controls]
    if remedy == "auto":
        assert min(sigmas) < 1.5  # some layer has full rank, and eq:sigma asks for less
    else:
        assert sigmas == [1.5] * len(sigmas)


class Reversed(nn.Module):
    """Layers are registered in another order than they run, one is called by keyword, and one input is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.first, self.middle = nn.Linear(4, 3), nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = self.middle(input=x).tanh()
        x += y
        return self.out(x)


@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_layers_may_run_in_any_order(simultaneous: bool) -> None:
    check_step(Reversed, dpulr.Paper(**BASE, simultaneous=simultaneous), SIGMA0)


@pytest.mark.parametrize("make", [mlp, convolutions, images, Reversed])
@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_single_precision_gives_the_same_step(make: Any, simultaneous: bool) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = make().to(dtype)
        settings = dpulr.Paper(**BASE, remedy="extra-noise", simultaneous=simultaneous)
        inputs, targets = data().tensors
        engine = engine_for(model, TensorDataset(inputs.to(dtype), targets), settings, noise_multiplier=SIGMA0)
        for batch in engine.batches():
            engine.step(*batch)
        found.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


class Moody(nn.Module):
    """A black box that takes no large input."""

    def forward(self, x: Tensor) -> Tensor:
        if np.abs(x.numpy()).max() > 2.5:
            raise RuntimeError("out of range")
        return x


@pytest.mark.parametrize("simultaneous", [False, True])
def test_a_pass_that_raises_counts_as_no_loss(simultaneous: bool) -> None:
    """The other rows are as if it had not been there."""

    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.abs().amax(-1, keepdim=True) > 2.5, torch.nan, x)

    found = []
    for box in (Moody(), Silent()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), box, nn.Linear(4, 3)).double()
        settings = dpulr.Paper(**{**BASE, "sigma": 3.0, "max_grad_norm": 1e9}, target_std=0, simultaneous=simultaneous)
        engine = engine_for(model, data(), settings)
        for batch in engine.batches():
            engine.step(*batch)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert found[0].norm() > 0
    torch.testing.assert_close(*found)


def test_without_target_it_is_plain_ulr() -> None:
    engine = check_step(mlp, dpulr.Paper(**BASE), 0.0)
    assert engine.guarantee == "none"
    assert engine.privacy_spent().nominal_epsilon is None


def test_plain_ulr_need_not_clip() -> None:
    norms = []
    for clip in (1e9, math.inf):
        torch.manual_seed(0)
        model = mlp().double()
        engine = engine_for(model, data(), dpulr.Paper(target_std=0, max_grad_norm=clip))
        for batch in engine.batches():
            engine.step(*batch)
        norms.append([p.grad.norm().item() for p in model.parameters()])
    assert norms[0] == pytest.approx(norms[1])
    engine = engine_for(model, data(), dpulr.Paper(target_std=1, max_grad_norm=math.inf))
    batch = next(engine.batches())
    with pytest.raises(ValueError, match="max_grad_norm is infinite"):
        engine.step(*batch)


@pytest.mark.parametrize("most", [100.0, 0.4])
def test_the_virtual_linear_layer_perturbs_parameters(most: float) -> None:
    """J is the identity: the covariance is the sum of squared losses times the identity, and eq:sigma is explicit."""
    torch.manual_seed(0)
    model, records = mlp().double(), data()
    engine = engine_for(model, records, dpulr.Paper(**{**BASE, "sigma": most}, remedy="parameters"), noise_multiplier=SIGMA0)
    losses, z = [], {}
    for inputs, targets in engine.batches():
        with torch.no_grad():
            losses = LOSS(model(inputs), targets)
            clean = {n: p.clone() for n, p in model.named_parameters()}
        engine.step(inputs, targets)
    asked = math.sqrt(losses.square().sum().item() / 3) / (0.7 * SIGMA0)
    sigmas = [min(asked, most * site.scale) for site in engine.forward.sites]
    assert [c.sigma for c in engine.bound.controls] == pytest.approx(sigmas)
    assert (sigmas[0] < asked) == (most == 0.4)
    rng = RandomSource(12).numpy("directions")
    for layer, sigma in zip(("0", "2", "3"), sigmas, strict=True):
        names = [n for n in clean if n.startswith(layer)]
        width = sum(clean[n].numel() for n in names)
        z = torch.from_numpy(rng.standard_normal((3, len(inputs), width), np.float32)).double() * sigma
        total = torch.zeros(width, dtype=torch.float64)
        for i in range(len(inputs)):
            proxy = torch.zeros(width, dtype=torch.float64)
            for k in range(3):
                parts = torch.split(z[k, i], [clean[n].numel() for n in names])
                moved = clean | {n: clean[n] + part.view_as(clean[n]) for n, part in zip(names, parts, strict=True)}
                loss = LOSS(torch.func.functional_call(model, moved, (inputs[i : i + 1],)), targets[i : i + 1])
                proxy += z[k, i] * loss.item() / sigma**2 / 3
            total += proxy / max(1, proxy.norm().item() / 0.7)
        found = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if n in names])
        torch.testing.assert_close(found, total / 6, rtol=1e-5, atol=1e-5)


# --- the controller -------------------------------------------------------------------------------------------------------
def bound_for(make: Any, settings: dpulr.Paper, records: int, **more: Any) -> tuple[BoundPaper, Tensor, Tensor]:
    torch.manual_seed(0)
    model = make().double()
    x, y = data(records).tensors
    forward = prepare(model, LOSS, (x[:1], y[:1]), CPU, space=settings.space)
    bound = settings.bind(forward, seed=0, **({"memory_limit": None} | more))
    bound.use(SIGMA0)
    return bound, x, y


@pytest.mark.parametrize("make", [mlp, convolutions, images, Residual])
@pytest.mark.parametrize("records", [2, 4, 40])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_the_spectrum_is_that_of_the_dense_matrix(make: Any, records: int) -> None:
    """Smallest eigenvalue, rank, and the covariance of the extra noise, against a dense decomposition; thin and not."""
    bound, x, y = bound_for(make, dpulr.Paper(**BASE), records)
    literal = Literal(bound.forward.model, data(records), bound.settings, rate=1.0, threshold=records)
    with torch.inference_mode():
        clean = bound.forward.clean(x, y)
        for blocks, call, layer in zip(bound.blocks, clean.calls, literal.layers, strict=True):
            covariance = Covariance(blocks, bound.dtype, CPU)
            blocks.add(call, clean.losses, covariance)
            with torch.inference_mode(False):
                dense = literal.covariance(layer)
            values, q = torch.linalg.eigh(dense)
            expected = values[0].item() if values[0] > 1e-10 * values[-1] else 0.0
            assert covariance.smallest() == pytest.approx(expected, rel=1e-6, abs=1e-9)
            assert covariance.rank() * blocks.copies == int((values > 1e-10 * values[-1]).sum())
            # The linear map from standard normal noise to extra noise, column by column: it must be the dense square root.
            target, credit = 0.8, 0.3 / values[-1].item()
            for c in (credit, 40 * credit):
                columns = []
                for unit in torch.eye(len(values), dtype=torch.float64):
                    packed = blocks.pack(blocks.site.rule.split(unit))
                    noise = blocks.unpack(covariance.extra_noise(packed, target, c))
                    columns.append(torch.cat([noise[name].flatten() for name in blocks.site.parameters]))
                root = q @ torch.diag((target**2 - c * values).clamp_min(0).sqrt()) @ q.t()
                torch.testing.assert_close(torch.stack(columns, 1), root, rtol=1e-6, atol=1e-6)


def test_eq_sigma_is_exact_in_single_precision() -> None:
    """Eigenvalues that differ by five orders of magnitude: in float32 the smallest would drown in rounding."""
    torch.manual_seed(0)
    x, y = torch.randn(1200, 300), torch.arange(1200) % 3
    x[:, -1] *= 5e-3
    sigmas = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 3)).to(dtype)
        forward = prepare(model, LOSS, (x[:1].to(dtype), y[:1]), CPU, space="output")
        bound = dpulr.Paper(sigma=1e3, target_std=1.0, remedy="none").bind(forward, memory_limit=None, seed=0)
        with torch.inference_mode():
            bound.total(x.to(dtype), y, RandomSource(1).directions(CPU, dtype))
        sigmas.append(bound.controls[0].sigma)
    assert sigmas[0] == pytest.approx(sigmas[1], rel=1e-4)


def test_embeddings_have_a_block_a_token() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(6, 3)).double()
    x, y = torch.tensor([[1, 2], [2, 2], [0, 5], [3, 4]]), torch.tensor([0, 1, 2, 0])
    forward = prepare(model, LOSS, (x[:1], y[:1]), CPU, space="output")
    bound = dpulr.Paper(**BASE).bind(forward, memory_limit=None, seed=0)
    with torch.inference_mode():
        clean = forward.clean(x, y)
        covariance = Covariance(bound.blocks[0], bound.dtype, CPU)
        bound.blocks[0].add(clean.calls[0], clean.losses, covariance)
        squares = clean.losses.square()
        counts = [squares[0], squares[0] + 2 * squares[1], squares[3], squares[3], squares[2]]
        torch.testing.assert_close(covariance.decomposed()[0].flatten()[1:], torch.stack(counts))
        assert covariance.smallest() == pytest.approx(min(c.item() for c in counts))


@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_chunks_of_records_change_nothing() -> None:
    """The controller sees the whole batch, whatever the memory limit splits."""
    controls = []
    for limit in (None, 20_000):
        bound, x, y = bound_for(mlp, dpulr.Paper(**BASE, remedy="auto"), 60, memory_limit=limit)
        with torch.inference_mode():
            bound.total(x, y, RandomSource(5).directions(CPU, torch.float64))
        controls.append([control.sigma for control in bound.controls])
    assert len(list(bound.record_chunks(x, y))) > 1
    assert controls[0] == pytest.approx(controls[1])


@pytest.mark.parametrize("make", [mlp, images])
def test_given_sigma_one_clean_pass_does(make: Any) -> None:
    """With extra noise chunks are observed and estimated in one go; the covariance is that of the whole batch."""
    found = []
    for limit in (None, 300_000 if make is images else 20_000):
        bound, x, y = bound_for(make, dpulr.Paper(**BASE, remedy="extra-noise"), 60, memory_limit=limit)
        with torch.inference_mode():
            bound.total(x, y, RandomSource(5).directions(CPU, torch.float64))
            found.append([c.decomposed()[0] for c in bound._extra if c is not None])
    assert len(list(bound.record_chunks(x, y))) > 1
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_records_that_are_not_finite_add_nothing_to_a_convolution(bad: float) -> None:
    bound, x, y = bound_for(images, dpulr.Paper(**BASE, remedy="extra-noise"), 6)
    found = []
    with torch.inference_mode():
        for records in (x[:5], torch.cat([x[:5], torch.full_like(x[:1], bad)])):
            clean = bound.forward.clean(records, y[: len(records)])
            covariances = [Covariance(blocks, bound.dtype, CPU) for blocks in bound.blocks]
            for blocks, call, covariance in zip(bound.blocks, clean.calls, covariances, strict=True):
                blocks.add(call, clean.losses, covariance)
            found.append([covariance.decomposed()[0] for covariance in covariances[1:]])
        total = bound.total(records, y[:6], RandomSource(5).directions(CPU, torch.float64))
    torch.testing.assert_close(found[0][:2], found[1][:2])
    assert bool(torch.isfinite(total).all())


def test_lacking_rank_is_reported_by_name() -> None:
    bound, x, y = bound_for(mlp, dpulr.Paper(**BASE, remedy="none"), 3)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"'0' \(Linear\): the covariance has rank 12 of 24"):
        bound.total(x, y, RandomSource(5).directions(CPU, torch.float64))
    bound, x, y = bound_for(mlp, dpulr.Paper(**BASE), 3)
    with torch.inference_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            bound.total(x, y, RandomSource(5).directions(CPU, torch.float64))
    said = [str(w.message) for w in caught if "'0'" in str(w.message)]
    assert len(said) == 1
    assert "rank 12 of 24, so extra noise is added" in said[0]


def test_clipping_is_layer_by_layer() -> None:
    """A record's gradient has norm C in every layer, so sqrt(layers) C in all: the first item of docs/errata.md."""
    bound, x, y = bound_for(mlp, dpulr.Paper(**{**BASE, "sigma": 1e-3}, target_std=0), 1)
    with torch.inference_mode():
        total = bound.total(x, y, RandomSource(5).directions(CPU, torch.float64))
    assert [part.norm().item() for part in bound._parts(total)] == pytest.approx([0.7] * 3)


# --- by layer and by step -------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_settings_may_differ_by_layer_and_step() -> None:
    settings = dpulr.Paper(
        target_std={0: 1.0, 2: (2.0, 3.0, 4.0)},
        repeats=(1, 2, 3),
        max_grad_norm=lambda step, layer: 0.5 + step + 10 * layer,
        rejection_threshold={"0": 4, "1": (5, 6, 7)},
        sigma=0.3,
        remedy="extra-noise",
    )
    engine = engine_for(mlp().double(), data(40), settings, steps=4, batch_size=8)
    sizes, seen = [], []
    for inputs, targets in engine.batches():
        sizes.append(len(inputs))
        engine.step(inputs, targets)
        seen.append(engine.bound.controls)
    assert [[c.target_std for c in controls] for controls in seen] == [[1, 1, 1], [1, 1, 1], [2, 3, 4], [2, 3, 4]]
    assert [c.repeats for c in seen[0]] == [1, 2, 3]
    assert [c.clip for c in seen[3]] == [3.5, 13.5, 23.5]
    assert sizes[0] >= 4
    assert min(sizes[1:]) >= 7
    steps = [(c.step.release.target_std, c.step.rejection_threshold, c.count) for c in engine.ledger.charges]
    assert steps == [(1.0, 4, 1), (1.0, 7, 1), (2.0, 7, 2)]


@pytest.mark.parametrize("make", [mlp, convolutions])
@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_layers_with_settings_of_their_own_are_algorithm_1(make: Any) -> None:
    """The step of the literal transcription, layer by layer, in the second step of a schedule."""
    stds, repeats, clips, thresholds = (0.5, 0.9, 1.4), (1, 3, 2), (0.4, 0.7, 2.0), (2, 4, 5)
    settings = dpulr.Paper(
        target_std={0: 1.0, 1: stds}, repeats=repeats, max_grad_norm=clips, sigma=0.4, rejection_threshold=thresholds
    )
    torch.manual_seed(0)
    model = make().double()
    engine = engine_for(model, data(), settings, steps=2)
    batches = engine.batches()
    engine.step(*next(batches))
    inputs, targets = next(batches)
    literal = Literal(model, TensorDataset(inputs, targets), settings, rate=1.0, threshold=0)
    literal.batch = list(zip(inputs, targets, strict=True))
    literal.directions, literal.noise = RandomSource(77).numpy("directions"), RandomSource(77).numpy("noise")
    expected = [total / n for total, n in zip(literal.step(stds, repeats, clips), thresholds, strict=True)]
    engine._directions = RandomSource(77).directions(CPU, torch.float64)
    engine._noise = GaussianNoise(engine.bound.size, RandomSource(77).numpy("noise"))
    engine.step(inputs, targets)
    for layer, wanted in zip(literal.layers, expected, strict=True):
        torch.testing.assert_close(torch.cat([p.grad.flatten() for p in layer.parameters()]), wanted, rtol=1e-5, atol=1e-5)


def test_the_engines_threshold_divides_too() -> None:
    """N_B given to the mechanism or to the engine: the same step; both, and different: refused."""
    norms = []
    for own, given in ((4, 0), (None, 4), (None, 0)):
        torch.manual_seed(0)
        model = mlp().double()
        engine = engine_for(model, data(), dpulr.Paper(target_std=0, rejection_threshold=own), rejection_threshold=given)
        for batch in engine.batches():
            engine.step(*batch)
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
    assert norms[0] == pytest.approx(norms[1])
    assert norms[2] == pytest.approx(norms[0] * 4 / 6)
    with pytest.raises(ValueError, match="different rejection thresholds"):
        engine_for(mlp().double(), data(), dpulr.Paper(target_std=0, rejection_threshold=4), rejection_threshold=5)


def test_each_layer_divides_by_its_own_threshold() -> None:
    bound, _, _ = bound_for(mlp, dpulr.Paper(**BASE, target_std=0, rejection_threshold=(2, 4, 5)), 3)
    bound._control(bound.target_stds(), [])
    release = bound.release(torch.ones(bound.size, dtype=torch.float64), torch.zeros(bound.size).double(), 99.0)
    assert [part[0].item() for part in bound._parts(release)] == [0.5, 0.25, 0.2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0; it must be a whole number of at least 1"),
        ({"repeats": (1, 2)}, "repeats has 2 values, but the model has 3 layers"),
        ({"repeats": {5: 1}}, "repeats must say what holds from step 0 on"),
        ({"repeats": {"soon": 1}}, "repeats has the key 'soon'"),
        ({"target_std": -1.0}, "target_std is -1.0; it must be a number of at least 0"),
        ({"sigma": math.inf}, "sigma is inf; it must be a positive number"),
        ({"remedy": "prayer"}, "remedy is 'prayer'; it must be 'auto'"),
        ({"simultaneous": True, "repeats": (1, 2, 3)}, "repeats must be the same for all"),
        ({"simultaneous": True, "repeats": {0: 1, 4: (1, 2, 3)}}, "repeats must be the same for all"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for(mlp().double(), data(), dpulr.Paper(**({"target_std": 1.0} | options)))


def test_simultaneous_noise_shares_its_repeats_in_every_step() -> None:
    settings = dpulr.Paper(target_std=0, simultaneous=True, repeats=lambda step, layer: 2 if step == 0 else 1 + layer)
    engine = engine_for(mlp().double(), data(), settings, steps=2)
    batches = engine.batches()
    engine.step(*next(batches))
    with pytest.raises(ValueError, match="repeats must be the same for all"):
        engine.step(*next(batches))


# --- what is said about privacy -------------------------------------------------------------------------------------------
def test_it_states_no_epsilon() -> None:
    engine = engine_for(
        mlp().double(),
        data(200),
        dpulr.Paper(remedy="extra-noise"),
        batch_size=20,
        steps=5,
        noise_multiplier=4.0,
        insecure_noise_seed=None,
    )
    for batch in engine.batches():
        engine.step(*batch)
    spent = engine.privacy_spent()
    assert (spent.epsilon, spent.guarantee, engine.guarantee) == (None, "none", "none")
    expected = dpulr.accounting.paper_nominal_epsilon(
        target_std=4.0, sample_rate=0.1, steps=5, delta=1e-5, rejection_threshold=1, dataset_size=200
    )
    assert spent.nominal_epsilon == pytest.approx(expected, rel=1e-3)  # at N_B = 1 rejection costs next to nothing
    assert "No privacy guarantee" in str(spent)
    assert "layers are clipped one by one" in str(spent)
    assert "nominal, no guarantee" in str(spent)


@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_shuffled_batches_keep_the_nominal_value_and_say_so() -> None:
    engine = engine_for(
        mlp().double(), data(), dpulr.Paper(), noise_multiplier=4.0, sampling="shuffle", insecure_noise_seed=None, steps=2
    )
    for inputs, targets in engine.batches():
        assert len(inputs) == 6
        engine.step(inputs, targets)
    spent = engine.privacy_spent()
    assert spent.nominal_epsilon is not None
    assert "batches were shuffled" in str(spent)


def test_no_epsilon_can_be_targeted() -> None:
    with pytest.raises(ValueError, match="paper has no certified epsilon: no target_epsilon can be met"):
        engine_for(mlp().double(), data(), dpulr.Paper(), target_epsilon=1.0)
    with pytest.raises(ValueError, match="paper needs noise_multiplier"):
        engine_for(mlp().double(), data(), dpulr.Paper())
    with pytest.raises(ValueError, match="give one of the two"):
        engine_for(mlp().double(), data(), dpulr.Paper(target_std=2.0), noise_multiplier=1.0)
    with pytest.raises(ValueError, match="give a number"):
        engine_for(mlp().double(), data(), dpulr.Paper(target_std=2.0), rejection_threshold="auto")


def test_nominal_values_of_different_steps_add_up_before_alpha_is_chosen() -> None:
    acc = dpulr.accounting
    from dpulr.paper.nominal import nominal_of

    step = acc.SampledStep(acc.PaperRelease(4.0), 0.01, 60, 10_000)
    one = acc.paper_nominal_epsilon(
        target_std=4.0, sample_rate=0.01, steps=100, delta=1e-5, rejection_threshold=60, dataset_size=10_000
    )
    assert nominal_of([acc.Charge(step, 100)], 1e-5) == pytest.approx(one, rel=1e-9)
    assert nominal_of([acc.Charge(step, 40), acc.Charge(step, 60)], 1e-5) == pytest.approx(one, rel=1e-9)
    louder = acc.SampledStep(acc.PaperRelease(8.0), 0.01, 60, 10_000)
    mixed = nominal_of([acc.Charge(step, 40), acc.Charge(louder, 60)], 1e-5)
    assert mixed is not None
    assert mixed < one
    assert nominal_of([acc.Charge(acc.Unaccounted("x"), 1)], 1e-5) is None


@pytest.mark.parametrize(("sigma0", "inverse"), [(4.0, 120), (8.0, 120), (4.0, 300), (8.0, 938)])
def test_the_nominal_value_at_algorithm_1s_own_threshold_meets_the_theorems_conditions(sigma0: float, inverse: int) -> None:
    acc = dpulr.accounting
    from dpulr.paper.nominal import nominal_of

    rate, threshold = 1 / inverse, 60_000 // inverse
    step = acc.SampledStep(acc.PaperRelease(sigma0), rate, threshold, 59_999)
    one = acc.paper_nominal_epsilon(
        target_std=sigma0, sample_rate=rate, steps=25 * inverse, delta=1e-5, rejection_threshold=threshold, dataset_size=60_000
    )
    assert nominal_of([acc.Charge(step, 25 * inverse)], 1e-5) == pytest.approx(one, rel=2e-3)  # one record less


@pytest.mark.filterwarnings("ignore:the batch's gradients have no noise")
def test_layers_without_noise_are_named() -> None:
    engine = engine_for(mlp().double(), data(), dpulr.Paper(target_std=(0.0, 4.0, 4.0)), insecure_noise_seed=None)
    for batch in engine.batches():
        engine.step(*batch)
    assert "for 1 step: no noise was added to some layers" in str(engine.privacy_spent())
