"""The style sheet's colours: enough contrast for text in both schemes, and the same names in both."""

import re
from importlib.resources import files

import pytest

SHEET = files("softprune.lab.report").joinpath("page.css").read_text(encoding="utf-8")
COLOURS = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", SHEET)
LIGHT, DARK = ({name: pair[scheme] for name, *pair in COLOURS} for scheme in (0, 1))


def luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out(scheme: dict[str, str]) -> None:
    for text in ("ink", "muted", "kept", "dropped", "green", "g3", "g4", "g5"):
        assert contrast(scheme[text], scheme["paper"]) >= 4.5, text
    for text in ("ink", "muted"):
        assert contrast(scheme[text], scheme["wash"]) >= 4.5, text
    assert contrast(scheme["grey"], scheme["paper"]) >= 3
    assert contrast(scheme["kept"], scheme["was"]) >= 3  # the two parts of a bar
    for bar in ("even-from", "odd-from"):
        assert contrast(scheme["ink"], scheme[bar]) >= 4.5, bar


def test_every_colour_is_named_once_and_used() -> None:
    assert len(COLOURS) == len(LIGHT) == len(re.findall(r"^ *--", SHEET, re.MULTILINE))
    assert set(re.findall(r"var\(--([\w-]+)\)", SHEET)) == LIGHT.keys()
