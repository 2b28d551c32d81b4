"""Texts of a file, by a tokenizer; a language model's folder as a classifier; and one command that trains it privately."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpulr.data.texts import encoded, read_texts, tokenizer_of
from dpulr.errors import DataError, UsageError
from dpulr.language import text_classifier
from dpulr.runs.loading import load
from tests.support.small_cli import dpulr
from tests.support.tiny_bert import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer, as Hugging Face keeps them."""
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """Good and bad films, some of them as files are."""
    lines = [f'"a {"very " * (i % 7)}{word} film",{word}' for i in range(30) for word in ("good", "bad")]
    odd = ["", "\xff,good", '"a quote that is not closed,bad', "one field too many,good,1", ",good", "a film,neither", "a film,"]
    path = tmp_path / "reviews.csv"
    path.write_bytes("\n".join(["text,label", *lines, *odd]).encode("latin-1"))
    return path


def test_texts_are_cut_and_padded_to_one_length(folder: Path) -> None:
    rows = encoded(["a very good film", "very " * 50, "", None], tokenizer_of(folder), 6)
    assert rows.shape == (4, 2, 6)
    assert rows[0].tolist() == [[2, 8, 9, 5, 7, 3], [1, 1, 1, 1, 1, 1]]
    assert rows[1, 1].tolist() == [1] * 6
    assert rows[2].tolist() == rows[3].tolist() == [[2, 3, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_labels_are_words_and_broken_lines_contribute_nothing(folder: Path, reviews: Path) -> None:
    data = read_texts(reviews, text="text", label="label", classes=["bad", "good"], tokenizer=tokenizer_of(folder), length=8)
    assert len(data) == 60 + 6  # the empty line is none
    assert data.targets[:4].tolist() == [1, 0, 1, 0]
    assert np.isnan(data.targets[60:]).tolist() == [False, True, True, False, True, True]
    assert len(data.rows(slice(0, 10))) == 10


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"text": "review"}, "has no column 'review'; it has 'text', 'label'"),
        ({"label": "stars"}, "has no column 'stars'"),
        ({"classes": ["good"]}, "at least two different ones"),
        ({"length": 2}, "tokens is 2"),
    ],
)
def test_what_cannot_be_read_is_said(folder: Path, reviews: Path, changed: dict[str, Any], sentence: str) -> None:
    options = {"text": "text", "label": "label", "classes": ["bad", "good"], "length": 8, "tokenizer": tokenizer_of(folder)}
    with pytest.raises((DataError, ValueError), match=sentence):
        read_texts(reviews, **(options | changed))


def test_a_folder_without_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        tokenizer_of(tmp_path / "none")
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        text_classifier(tmp_path, 2)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UsageError, match="has no weights that can be read"):
        text_classifier(tmp_path, 2)


@pytest.mark.parametrize(
    ("trained", "names"),
    [("head", 2), ("last:1", 18), ("bias", 19), ("lora", 10), ("lora:1", 6), ("all", 39)],
)
def test_what_is_trained_is_chosen_by_a_word(folder: Path, trained: str, names: int) -> None:
    model = text_classifier(folder, 2, trained=trained)
    chosen = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(chosen) == names
    assert {"head.weight", "head.bias"} <= set(chosen)


@pytest.mark.parametrize("trained", ["some", "last", "last:9", "last:0", "lora:x", "head:2"])
def test_other_words_are_refused(folder: Path, trained: str) -> None:
    with pytest.raises(UsageError, match="trained is"):
        text_classifier(folder, 2, trained=trained)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [[], ["--keep-frozen", "memory"]], ids=["as it is", "frozen layers kept"])
def test_one_command_fine_tunes_a_model_on_a_file(
    folder: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: list[str]
) -> None:
    out, test = tmp_path / "run", tmp_path / "test.csv"
    test.write_text("text,label\na very good film,good\na bad film,bad\n")
    columns = ["--text", "text", "--label", "label", "--labels", "bad,good"]
    options = ["--dataset", f"csv:{reviews}", *columns, "--model", f"hf:{folder}"]
    sizes = ["--tokens", "8", "--batch-size", "20", "--steps", "3", "--epsilon", "8", "--delta", "1e-3", "--test", str(test)]
    ended = dpulr(capsys, "train", *options, *sizes, "--trained", "last:1", *kept, "--mechanism", "zeroth-order", "--out", out)
    assert ended.code == 0, ended.err
    found = json.loads((out / "result.json").read_text())
    assert found["guarantee"] == "certified"
    assert found["steps"] == 3
    before, after = dict(text_classifier(folder, 2, trained="last:1").named_parameters()), load(out).model
    moved = {name for name, parameter in after.named_parameters() if not torch.equal(parameter, before[name])}
    assert {"head.weight", "encoder.encoder.layer.1.output.dense.weight"} <= moved
    assert moved == {name for name, parameter in before.items() if parameter.requires_grad}  # in the model itself, and no other
