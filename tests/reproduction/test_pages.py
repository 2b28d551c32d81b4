"""The pages of docs/ say what the results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduction import documents, errata
from reproduction.pages import differs, fill, table


def test_a_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n")
    assert differs(page, {"one": "1"}) == ["one", "two (nobody fills it)"]
    assert fill(page, {"two": "2", "one": "1"})
    assert page.read_text() == "a\n<!-- one -->\n1\n<!-- end -->\nb\n<!-- two -->\n2\n<!-- end -->\n"
    assert not fill(page, {"two": "2"})
    assert differs(page, {"two": "2", "one": "1"}) == []
    with pytest.raises(ValueError, match="one place for 'three'"):
        fill(page, {"three": "3"})


def test_tables() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.parametrize("page", list(documents.PAGES))
def test_the_page_says_what_the_results_say(page: str) -> None:
    """`python -m reproduction pages` fills them again."""
    assert documents.check([page]) == []


def test_the_errata_show_what_their_texts_say() -> None:
    numbers = {erratum.title: erratum.compute() for erratum in errata.ERRATA}
    shown = list(numbers.values())
    assert len(shown) == 10
    assert shown[0] == (pytest.approx(2, abs=1e-3),)  # four layers, so sqrt(4) C
    credited, measured = shown[1]
    assert credited == 16
    assert measured < 64 / 35  # B C^2 / d
    assert shown[2] == (pytest.approx(12.25, abs=0.01), 0.0625)
    assert shown[3][1] > 10 * shown[3][0]
    assert shown[4][0] > 4
    assert shown[5] == pytest.approx((2.173, 1.386, 0.885), abs=1e-3)
    assert shown[6] == (1, 1)
    assert shown[7][1] > 2 * shown[7][0]
    assert 0 < shown[8][0] < 1e-3
    assert shown[9] == (0,)
