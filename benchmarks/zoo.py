"""Models that nobody here wrote, in tiny configurations: those of Hugging Face, and a ResNet-18 with GroupNorm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn

T: Any = transformers
T.logging.set_verbosity_error()
LENGTH = 16
_CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")
_TEXT = {"vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": None}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 2}


def of_classes(output: Any, targets: Tensor) -> Any:
    return _CROSS_ENTROPY(output.logits, targets)


def of_tokens(output: Any, targets: Tensor) -> Any:
    """Mean over a record's positions."""
    return _CROSS_ENTROPY(output.logits.transpose(1, 2), targets).mean(1)


def words(*names: str) -> Callable[[int], Any]:
    def batch(records: int) -> Any:
        generator = torch.Generator().manual_seed(records)
        inputs = {name: torch.randint(0, 2, (records, LENGTH), generator=generator) for name in names}
        inputs["attention_mask"][:, : LENGTH // 2] = 1
        return inputs, torch.zeros(records, dtype=torch.int64)

    return batch


def tokens(*names: str) -> Callable[[int], Any]:
    def batch(records: int) -> Any:
        inputs = words(*names)(records)[0]
        return inputs, inputs["input_ids"].roll(-1, 1)

    return batch


def pixels(records: int) -> Any:
    generator = torch.Generator().manual_seed(records)
    return {"pixel_values": torch.rand(records, 3, 32, 32, generator=generator)}, torch.zeros(records, dtype=torch.int64)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[[Any, Tensor], Tensor] = of_classes

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().eval()


def _tied_and_frozen(model: Any) -> nn.Module:
    model.get_input_embeddings().weight.requires_grad_(False)
    made: nn.Module = model
    return made


def _bert() -> Any:
    return T.BertForSequenceClassification(T.BertConfig(**_TEXT, **_SIZES))


def _distilbert() -> Any:
    return T.DistilBertForSequenceClassification(T.DistilBertConfig(**_TEXT, dim=32, n_layers=2, n_heads=2, hidden_dim=64))


def _gpt2() -> Any:
    return _tied_and_frozen(T.GPT2LMHeadModel(T.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64)))


def _llama() -> Any:
    return T.LlamaForCausalLM(T.LlamaConfig(**_TEXT, **_SIZES, tie_word_embeddings=False))


def _t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return _tied_and_frozen(T.T5ForConditionalGeneration(T.T5Config(vocab_size=100, **sizes, decoder_start_token_id=0)))


def _vit() -> Any:
    return T.ViTForImageClassification(T.ViTConfig(**_SIZES, **_IMAGE))


def _deit() -> Any:
    return T.DeiTForImageClassification(T.DeiTConfig(**_SIZES, **_IMAGE))


def _convnext() -> Any:
    return T.ConvNextForImageClassification(T.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=2))


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, after), nn.GroupNorm(4, after)])
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        out: Tensor = (inner + self.skip(x)).relu()
        return out


class _ResNet18(nn.Module):
    """Four stages of two blocks; 8 channels in the first."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 8, 16, 32, 64]
        blocks: list[nn.Module] = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.GroupNorm(4, 8), nn.ReLU()]
        for i, (before, after) in enumerate(pairwise(widths)):
            blocks += [_Block(before, after, 1 if i == 0 else 2), _Block(after, after, 1)]
        self.body = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))

    def forward(self, pixel_values: Tensor) -> Tensor:
        scores: Tensor = self.body(pixel_values)
        return scores


MODELS = {
    "BERT": Case(_bert, words("input_ids", "attention_mask")),
    "DistilBERT": Case(_distilbert, words("input_ids", "attention_mask")),
    "GPT-2": Case(_gpt2, tokens("input_ids", "attention_mask"), of_tokens),
    "Llama": Case(_llama, tokens("input_ids", "attention_mask"), of_tokens),
    "T5": Case(_t5, tokens("input_ids", "attention_mask", "decoder_input_ids"), of_tokens),
    "ViT": Case(_vit, pixels),
    "DeiT": Case(_deit, pixels),
    "ConvNeXt": Case(_convnext, pixels),
    "ResNet-18, GroupNorm": Case(_ResNet18, pixels, _CROSS_ENTROPY),
}
