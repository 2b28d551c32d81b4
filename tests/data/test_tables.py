"""Tables from files: what a schema makes of a column, one record changes its own row alone, drafts void the guarantee."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpulr
from dpulr.data.table_schema import TableSchema
from dpulr.data.tables import draft, read_table
from dpulr.errors import DataError
from tests.support.small_cli import Ended

SCHEMA = """
label = "sick"
[columns.age]
low = 0
high = 100
[columns.dose]
low = 0
high = 99
scale = "log"
[columns.weight]
low = 0
high = 120
bins = [60, 80]
[columns.ward]
categories = ["a", "b, c"]
[columns.sick]
categories = ["no", "yes"]
"""
LINES = [b"id,age,dose,weight,ward,sick", b"1,50,0,70,a,no", b'2,100,99,20,"b, c",yes', b"3, 0 ,9,95,z,yes", b"4,,x,,,no"]


def files(folder: Path, lines: list[bytes] = LINES, schema: str = SCHEMA) -> tuple[Path, Path]:
    (folder / "t.csv").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "s.toml").write_text(schema)
    return folder / "t.csv", folder / "s.toml"


# --- what comes out -------------------------------------------------------------------------------------------------------
def test_columns_become_features(tmp_path: Path) -> None:
    table = read_table(*files(tmp_path))
    assert table.features == ["age", "dose", "weight 0 to 60", "weight 60 to 80", "weight 80 to 120", "ward=a", "ward=b, c"]
    expected = [[0, -1, 0, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0, 1], [-1, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]]
    assert np.allclose(table.inputs, expected, atol=1e-6)
    assert table.targets.tolist() == [0, 1, 1, 0]
    assert table.labels.tolist() == ["no", "yes", "yes", "no"]
    assert (len(table.rows(1, 3)), table.rows(1, 3).labels.tolist()) == (2, ["yes", "yes"])


def test_parquet_gives_the_same(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    csv, schema = files(tmp_path)
    columns = {
        "age": pa.array([50, 100, 0, None]),
        "dose": pa.array([0.0, 99.0, 9.0, None]),
        "weight": pa.array([70, 20, 95, None]),
        "ward": pa.array(["a", "b, c", "z", None]),
        "sick": pa.array(["no", "yes", "yes", "no"]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    one, other = read_table(csv, schema), read_table(tmp_path / "t.parquet", schema)
    assert np.array_equal(one.inputs, other.inputs)
    assert np.array_equal(one.targets, other.targets)


def test_a_label_that_is_a_number(tmp_path: Path) -> None:
    table = read_table(*files(tmp_path), label="age")
    assert table.classes == []
    assert np.allclose(table.targets, [0, 1, -1, np.nan], equal_nan=True)
    assert np.allclose(table.labels, [50, 100, 0, np.nan], equal_nan=True)


# --- one record, one row --------------------------------------------------------------------------------------------------
BAD = [
    b'9,"50,0,70,a,no',
    b"9,1,2",
    b"\xff\xfe,\x00,\x00,,,",
    b"9,1e999,-inf,nan,a,maybe",
    b'9,1,2,3,a,"no',
    b"9" * 200_000,
    b'"' * 999,
]


@pytest.mark.parametrize("line", BAD, ids=lambda line: repr(line[:12]))
def test_a_bad_line_changes_its_own_row_alone(line: bytes, tmp_path: Path) -> None:
    good = read_table(*files(tmp_path))
    bad = read_table(*files(tmp_path, [*LINES[:2], line, *LINES[2:]]))
    assert len(bad) == len(good) + 1
    others = [0, 2, 3, 4]
    assert np.array_equal(bad.inputs[others], good.inputs)
    assert np.array_equal(bad.targets[others], good.targets)
    assert np.isfinite(bad.inputs).all()
    assert np.abs(bad.inputs).max() <= 1
    assert np.isnan(bad.targets[1]) or line.endswith(b'"no')  # the end of a line closes a quote


def test_a_record_without_a_label_contributes_nothing(tmp_path: Path) -> None:
    """It is left out of every batch, in silence."""
    lines = [LINES[0], *[b"1,50,0,70,a,perhaps"] * 30, *[b"1,50,0,70,a,yes"] * 10]
    table = read_table(*files(tmp_path, lines))
    model = torch.nn.Linear(len(table.features), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    engine = dpulr.PrivacyEngine(model, optimizer, table, loss, batch_size=40, steps=1, noise_multiplier=1.0)
    for inputs, targets in engine.batches():
        assert targets.tolist() == [1] * 10
        engine.step(inputs, targets)
    assert "int64 of shape ()" in str(engine.privacy_spent())


# --- schemas --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("label = 3", "a schema has a label and tables"),
        ("columns = 3", "a schema has a label and tables"),
        ("[columns.sick]\ncategories = ['no']", "which column is the label"),
        ("label = 'x'\n[columns.sick]\ncategories = ['no']", r"no \[columns.x\]"),
        ("label = 'sick'\n[columns.sick]\ncategories = ['no']", "no column but the label"),
        (SCHEMA.replace("high = 100", "high = 0"), "low below high"),
        (SCHEMA.replace("high = 100", "hihg = 0"), "has 'hihg'; it may have low, high"),
        (SCHEMA.replace('"log"', '"cubic"'), "must be 'linear' or 'log'"),
        (SCHEMA.replace("[60, 80]", "[80, 60]"), "numbers that rise"),
        (SCHEMA.replace('["no", "yes"]', '["no", "no"]'), "different words"),
        (SCHEMA.replace('["no", "yes"]', '["no"]\nlow = 1'), "one of the two"),
        (SCHEMA + "from_data = 1", "must be true or false"),
        (SCHEMA.replace("[columns.age]", "[columns.aeg]"), "has no column 'aeg'; it has 'id', 'age'"),
        ("[", "no valid TOML"),
    ],
)
def test_a_wrong_schema_is_explained(schema: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        read_table(*files(tmp_path, schema=schema))


def test_files_that_are_none(tmp_path: Path) -> None:
    csv, schema = files(tmp_path)
    with pytest.raises(DataError, match="no file"):
        read_table(tmp_path / "x.csv", schema)
    with pytest.raises(DataError, match="no Parquet file"):
        read_table(csv, schema, kind="parquet")
    with pytest.raises(DataError, match="can't be read"):
        read_table(csv, tmp_path / "x.toml")
    csv.write_bytes(b"\n")
    with pytest.raises(DataError, match="no header"):
        read_table(csv, schema)
    csv.write_bytes(b"a,a\n")
    with pytest.raises(DataError, match="two columns 'a'"):
        read_table(csv, schema)


def test_a_draft_is_a_schema_that_voids_the_guarantee(tmp_path: Path) -> None:
    rows = [f"{i},{20 + i % 50},{i % 7},{60 + i % 30},{'ab'[i % 2]},{['no', 'yes'][i % 3 == 0]}".encode() for i in range(90)]
    csv, schema = files(tmp_path, [LINES[0], *rows])
    text = draft(csv, "sick")
    values = [line for line in text.splitlines() if line.startswith(("low", "high", "categories", "use"))]
    assert len(values) == 9
    assert all("# UNPROTECTED: from the data" in line for line in values)
    schema.write_text(text)
    table = read_table(csv, schema)
    assert table.features == ["age", "dose", "weight", "ward=a", "ward=b"]  # the id identifies a record
    assert "drafted from the data: for id, age, dose, weight, ward and 1 more" in str(table.reason_for_none)
    schema.write_text(text.replace("from_data = true", ""))
    assert TableSchema.read(schema).reason_for_none is None


# --- the command line -----------------------------------------------------------------------------------------------------
@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, list[Any]]:
    rng = np.random.default_rng(0)
    lines = [f"{i},{age},0,70,a,{'yes' if age > 50 else 'no'}".encode() for i, age in enumerate(rng.integers(0, 100, 600))]
    csv, schema = files(tmp_path, [LINES[0], *lines])
    options = ["--dataset", f"csv:{csv}", "--schema", schema, "--batch-size", 100, "--epochs", 20, "--epsilon", 5, "--lr", 2]
    return tmp_path, ["train", *options]


def test_a_table_is_trained_on(job: tuple[Path, list[Any]], run_cli: Callable[..., Ended]) -> None:
    folder, command = job
    ended = run_cli(*command, "--test", folder / "t.csv", "--evaluations", 1, "--out", folder / "run", "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out.splitlines()[-1])
    assert result["test_accuracy"] > 0.85
    assert (result["guarantee"], result["mechanism"]) == ("certified", "gradient")
    assert [row["class"] for row in json.loads((folder / "run" / "result.json").read_text())["test_classes"]] == ["no", "yes"]
    assert "    yes " in run_cli("evaluate", folder / "run").out
    planned = run_cli("plan", *command[1:], "--json")
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["noise_multiplier"] == result["noise_multiplier"]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ([], 2, "has no test part. Give --test FILE"),
        (["--holdout", 10, "--test", "x.csv"], 2, "no file x.csv"),
        (["--evaluations", 0, "--loss", "hinge"], 2, "loss is 'hinge'"),
        (["--evaluations", 0, "--device", "cuda:77"], 2, "device is 'cuda:77', which torch can't use here"),
    ],
)
def test_mistakes(job: tuple[Path, list[Any]], run_cli: Callable[..., Ended], more: list[Any], code: int, said: str) -> None:
    ended = run_cli(*job[1], *more, "--out", job[0] / "run")
    assert (ended.code, (job[0] / "run").exists()) == (code, False)
    assert said in ended.err


def test_a_draft_is_refused_until_it_is_public(job: tuple[Path, list[Any]], run_cli: Callable[..., Ended]) -> None:
    folder, command = job
    drafted = folder / "draft.toml"
    assert "UNPROTECTED" in run_cli("data", "schema", folder / "t.csv", "--label", "sick", "--out", drafted).out
    command[command.index("--schema") + 1] = drafted
    ended = run_cli(*command, "--evaluations", 0, "--out", folder / "run")
    assert ended.code == 3
    assert "the schema was drafted from the data" in ended.err
    drafted.write_text(drafted.read_text().replace("from_data = true", ""))
    assert run_cli(*command, "--evaluations", 0, "--out", folder / "run").code == 0


def test_a_column_outside_of_the_schema_says_who_a_record_belongs_to(tmp_path: Path) -> None:
    from dpulr.membership import Membership

    (tmp_path / "schema.toml").write_text(SCHEMA)
    lines = [
        LINES[0],
        *[line.replace(line[:1], who, 1) for line, who in zip(LINES[1:], (b"ann", b"bob", b"", b"ann"), strict=True)],
    ]
    (tmp_path / "t.csv").write_bytes(b"\n".join(lines))
    table = read_table(tmp_path / "t.csv", tmp_path / "schema.toml")
    assert Membership.of(table, "id").owners.tolist() == [0, 1, -1, 0]
    assert Membership.of(table.rows(1), "id").owners.tolist() == [0, -1, 1]
    assert Membership.of(torch.utils.data.Subset(table, [3, 0, 1]), "id").owners.tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="no such column; it has 'id', 'age'"):
        Membership.of(table, "person")
