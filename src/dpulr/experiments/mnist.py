"""The main job: MNIST, the paper's MLP, hidden-direction, epsilon 1. `python -m dpulr.experiments.mnist`."""

from __future__ import annotations

from torch import nn

from dpulr.experiments.training import Recipe, run
from dpulr.mechanisms import HiddenDirection

MAIN = Recipe(HiddenDirection(repeats=8), batch_size=2_000, epochs=10, target_epsilon=1.0, learning_rate=0.4)


def main() -> None:
    def show(step: int, steps: int, model: nn.Module) -> None:
        if step % max(1, steps // 10) == 0:
            print(f"step {step} of {steps}", flush=True)

    print("MNIST, MLP 784-128-64-32-10, hidden-direction: calibrating the noise ...", flush=True)
    result = run(MAIN, show)
    print(result["statement"])
    print(
        f"accuracy {result['test_accuracy']:.2%}   epsilon {result['epsilon']:.4g}   delta {result['delta']:g}   "
        f"guarantee {result['guarantee']}   {result['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
