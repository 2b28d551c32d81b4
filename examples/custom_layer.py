"""A layer of your own: register a rule for it, and check the rule against `torch.func`.

What one learns: any layer is trained without a rule, in the space of its weights. A rule says how a signal at the layer's output
becomes a gradient. The secret direction then lives in the output, which is far smaller: more is learnt from one bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import TensorDataset

import dpulr
from dpulr import layers


class Quadratic(nn.Module):
    """W [x, x^2]: linear in its weights, though not in its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, 2 * inputs) / (2 * inputs) ** 0.5)

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.square()], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) @ self.weight.t()


class QuadraticRule(layers.WeightLinearRule):
    """A record's gradient is the outer product of the signal u (at its output) and its features f."""

    handles = frozenset({"weight"})
    shares_positions = True  # a subspace of the output may be taken
    module: Quadratic

    def factor(self, call: layers.Call) -> Tensor:
        return self.module.features(call.input)

    def gains(self, call: layers.Call) -> Tensor:
        """How much longer than u the gradient can be: |u f^T| = |u| |f|. An upper bound is enough, but it must be one."""
        return torch.linalg.vector_norm(self.factor(call), dim=1)

    def norms(self, call: layers.Call, signal: Tensor) -> Tensor:
        return torch.linalg.vector_norm(signal, dim=1) * self.gains(call)

    def add_gradient(self, call: layers.Call, signal: Tensor, into: dict[str, Tensor]) -> None:
        into["weight"].addmm_(signal.t(), self.factor(call))

    def shift(self, call: layers.Call, deltas: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        """(repeats, records, outputs): what moved weights add to the output. Each row has its own weights."""
        return torch.einsum("rnof,nf->rno", deltas["weight"], self.factor(call))


layers.register(Quadratic, QuadraticRule)


def check(records: int = 5, inputs: int = 3, outputs: int = 4) -> float:
    """The largest difference between the rule and what `torch.func` finds, record by record."""
    layer, x = Quadratic(inputs, outputs).double(), torch.randn(records, inputs, dtype=torch.float64)
    u = torch.randn(records, outputs, dtype=torch.float64)
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    jacobian = vmap(jacrev(lambda w, row: functional_call(layer, w, (row,))), (None, 0))(weights, x)["weight"].flatten(2)
    gradients = torch.einsum("no,nop->np", u, jacobian)
    with torch.no_grad():
        rule, call = QuadraticRule(layer, dict(layer.named_parameters())), layers.Call((x,), {}, layer(x))
        found = torch.zeros_like(layer.weight)
        rule.add_gradient(call, u, {"weight": found})
        assert (rule.gains(call) >= torch.linalg.matrix_norm(jacobian, ord=2) * (1 - 1e-12)).all()
        errors = [found.flatten() - gradients.sum(0), rule.norms(call, u) - gradients.norm(dim=1)]
    return max(error.abs().max().item() for error in errors)


def main(steps: int = 60) -> tuple[dpulr.PrivacyEngine, float]:
    """Train with the layer; return the engine, and the accuracy on the training records."""
    torch.manual_seed(0)
    x = torch.randn(2_000, 6)
    y = (x[:, :3].square().sum(1) > x[:, 3:].square().sum(1)).long()
    model = nn.Sequential(Quadratic(6, 8), nn.GELU(), nn.Linear(8, 2))
    loss = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine = dpulr.PrivacyEngine(model, optimizer, TensorDataset(x, y), loss, batch_size=200, steps=steps, target_epsilon=3.0)
    for inputs, targets in engine.batches():
        engine.step(inputs, targets)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"rule off by {check():.1e}; sites {list(engine.forward.sites)}; accuracy {accuracy:.3f}")
    return engine, accuracy


if __name__ == "__main__":
    main()
