"""The style sheet's colours: enough contrast for text in both schemes, and the same names in both."""

import re
from importlib.resources import files

import pytest

SHEET = files("softprune.report").joinpath("page.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for block in re.findall(r":root \{(.*?)\}", SHEET, re.DOTALL)
)


def luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out(scheme: dict[str, str]) -> None:
    for text in ("ink", "muted", "kept", "dropped", "green", *(f"g{index}" for index in range(7))):
        assert contrast(scheme[text], scheme["paper"]) >= 4.5, text
    for text in ("ink", "muted"):
        assert contrast(scheme[text], scheme["wash"]) >= 4.5, text
    assert contrast(scheme["grey"], scheme["paper"]) >= 3
    assert contrast(scheme["kept"], scheme["was"]) >= 3  # the two parts of a bar
    for bar in ("even-from", "odd-from"):
        assert contrast(scheme["on-bar"], scheme[bar]) >= 4.5, bar


def test_every_colour_is_named_in_both_schemes_and_used() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert set(re.findall(r"var\(--([\w-]+)\)", SHEET)) == LIGHT.keys()
