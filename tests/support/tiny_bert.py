"""A tiny BERT with its tokenizer, as Hugging Face keeps them in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]


def save(place: Path) -> Path:
    (place / "vocab.txt").write_text("\n".join(_WORDS))
    transformers.BertTokenizerFast(str(place / "vocab.txt")).save_pretrained(place)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(_WORDS), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(place)
    return place
