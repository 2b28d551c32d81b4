"""The errata: every demonstration shows what its text says, and the page is what the module prints."""

from __future__ import annotations

import re
from pathlib import Path

from reproduction import errata


def test_the_page_is_up_to_date_and_its_numbers_say_what_they_should() -> None:
    page = errata.markdown()
    assert page == (Path(__file__).parents[2] / "docs/errata.md").read_text()
    outputs = re.findall(r"```\n```\n(.*?)\n```", page, flags=re.DOTALL)
    assert len(outputs) == len(errata.ERRATA) == 10
    numbers = [[float(n) for n in re.findall(r"(?<![\w/(])\d+\.\d+(?:e-\d+)?", output)] for output in outputs]
    assert abs(numbers[0][0] - 2) < 1e-3  # four layers, so sqrt(4) C
    assert numbers[1][0] == 16
    assert numbers[1][1] < 64 / 35  # B C^2 / d
    assert numbers[2] == [12.25, 0.0625]
    assert numbers[3][1] > 10 * numbers[3][0]
    assert numbers[4][0] > 4
    assert numbers[5] == [2.173, 1.386, 0.885]
    assert "at least 1, at most 1" in outputs[6]
    assert numbers[7][-1] > 2 * numbers[7][-2]
    assert 0 < numbers[8][0] < 1e-3
    assert outputs[9].startswith("refused: the loss function mixes records")


def test_each_demonstration_has_two_lines() -> None:
    for erratum in errata.ERRATA:
        assert len(erratum.code.splitlines()) == 2
        assert erratum.severity in ("critical", "theoretical", "negligible")
