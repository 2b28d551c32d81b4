"""Language models of Hugging Face as classifiers of texts (`--model hf:PATH`), and which of their parameters are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpulr.errors import UsageError

TRAINED = "head, last:N (the last N blocks and the head), bias, lora, lora:N (in the last N blocks) or all"


class TextClassifier(nn.Module):
    """An encoder, the mean of its last states over a text's tokens, and a linear head. Inputs are those of data/texts.py."""

    def __init__(self, encoder: nn.Module, features: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores

    def features(self, x: Tensor) -> Tensor:
        tokens, mask = x[:, 0], x[:, 1]
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(2).to(states.dtype)
        mean: Tensor = (states * weights).sum(1) / weights.sum(1).clamp_min(1)
        return mean


def text_classifier(folder: str | Path, classes: int, *, trained: str = "head", seed: int = 0) -> TextClassifier:
    """The model in a folder, in eval mode, with a new head. `trained`: head, last:N, bias, lora, lora:N or all."""
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(f"{folder} is no model of Hugging Face: it has no config.json.")
    try:
        from transformers import AutoModel
        from transformers.utils import logging
    except ImportError as problem:
        raise UsageError("hf: needs transformers: pip install 'dpulr[text]'.") from problem
    logging.disable_progress_bar()
    try:
        encoder: Any = AutoModel.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
    except Exception as problem:
        raise UsageError(f"{folder} has no weights that can be read: {str(problem).strip().splitlines()[0]}") from problem
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # the mean takes its place
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TextClassifier(encoder, encoder.config.hidden_size, classes)
        return _with_trained(model, trained).eval()


def _with_trained(model: TextClassifier, trained: str) -> TextClassifier:
    kind, _, number = trained.partition(":")
    if kind not in ("head", "last", "bias", "lora", "all") or not (number.isdigit() if number or kind == "last" else True):
        raise UsageError(f"trained is {trained!r}; it must be {TRAINED}.")
    blocks = next((list(module) for module in model.encoder.modules() if isinstance(module, nn.ModuleList)), [])
    if number and (kind not in ("last", "lora") or not 0 < int(number) <= len(blocks)):
        raise UsageError(f"trained is {trained!r}; it must be {TRAINED}, and the model has {len(blocks)} blocks.")
    first = len(blocks) - int(number) if number else 0
    model.encoder.requires_grad_(kind == "all")
    if kind == "last":
        for block in blocks[first:]:
            block.requires_grad_(True)
    elif kind == "bias":
        for name, parameter in model.encoder.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
    elif kind == "lora":
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as problem:
            raise UsageError("trained='lora' needs peft: pip install 'dpulr[text]'.") from problem
        linear = {name.rpartition(".")[2] for name, m in model.encoder.named_modules() if isinstance(m, nn.Linear)}
        chosen = sorted(linear & {"query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "q", "v"}) or sorted(linear)
        where = {"layers_to_transform": list(range(first, len(blocks)))} if number else {}
        model.encoder = get_peft_model(model.encoder, LoraConfig(r=8, lora_alpha=16, target_modules=chosen, **where))
    return model
