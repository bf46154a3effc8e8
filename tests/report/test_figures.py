"""The small parts: escaping, numbers for readers, scales, labels that keep their distance."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softprune.report import formats
from softprune.report.figures import apart, figure
from softprune.report.markup import Markup, el, join, num
from softprune.report.naming import stages
from softprune.report.scales import Scale, limits, quantile, tick_label, ticks


def test_text_and_attributes_are_escaped_and_markup_is_not() -> None:
    inner = el("b", "<i>&\"'")
    assert inner == "<b>&lt;i&gt;&amp;&quot;&#x27;</b>"
    assert el("p", inner, title='"><script>') == f'<p title="&quot;&gt;&lt;script&gt;">{inner}</p>'
    assert isinstance(join(["<", inner]), Markup)
    assert el("input", checked=True, disabled=False, class_="a", data_low=0.5) == (
        '<input checked class="a" data-low="0.5">'
    )


def test_data_for_the_script_cannot_end_its_element() -> None:
    page = figure("x", data={"name": "</script><script>alert(1)</script>"})
    assert page.count("</script>") == 1
    with pytest.raises(ValueError, match="JSON"):
        figure("x", data=[math.nan])


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (formats.short(313_201_664), "313 M"),
        (formats.short(14_724_042), "14.7 M"),
        (formats.short(9_996_000), "10.0 M"),
        (formats.short(512), "512"),
        (formats.short(None), "\N{EM DASH}"),
        (formats.count(313_201_664), "313,201,664"),
        (formats.file_size(58_896_168), "58.9 MB"),
        (formats.percent(formats.cut(200, 67)), "66.5 %"),
        (formats.percent(-0.04), "0.0 %"),
        (formats.change(-0.06), "\N{MINUS SIGN}0.06"),
        (formats.change(0.06), "+0.06"),
        (formats.change(0.001), "0.00"),
        (formats.significant(-0.00012345), "\N{MINUS SIGN}0.000123"),
        (formats.duration(411.3), "6 min 51 s"),
        (formats.duration(7322), "2 h 02 min"),
        (formats.milliseconds(4.1834), "4.18 ms"),
    ],
)
def test_numbers_as_a_reader_gets_them(written: str, wanted: str) -> None:
    assert written.replace("\N{NARROW NO-BREAK SPACE}", " ") == wanted


def test_a_cut_of_nothing_is_unknown() -> None:
    assert formats.cut(0, 0) is None
    assert formats.cut(None, 3) is None
    assert formats.cut(4, 5) == -25.0


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_few_and_inside(low: float, span: float, wanted: int) -> None:
    found = ticks(low, low + span, wanted)
    slack = 1e-6 * max(abs(low), span)
    assert all(low - slack <= tick <= low + span + slack for tick in found)
    assert len(found) <= wanted + 1


def test_scales_and_limits() -> None:
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(0, 4, 0, 100, root=True)(1) == 50
    assert Scale(0, 10, 0, 100).clamp(99) == 100
    assert Scale(3, 3, 0, 100)(3) == 50
    assert limits([]) == (0.0, 1.0)
    low, high = limits([5.0])
    assert low < 5 < high
    assert limits([*range(1000), 1e9], trim=0.01)[1] < 2000
    assert quantile([1, 2, 3, 4], 0.5) == 2.5
    assert [tick_label(tick, [0, 0.25, -0.5]) for tick in (0, 0.25, -0.5)] == [
        "0.00",
        "0.25",
        "\N{MINUS SIGN}0.50",
    ]
    assert num(-0.001) == "0"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_keep_their_distance_and_order(wanted: list[float]) -> None:
    placed = apart(wanted, 10, 0, 100)
    ordered = sorted(placed)
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(ordered))
    assert all(0 <= place <= 100 for place in placed)
    assert all(
        placed[i] < placed[j] for i in range(len(wanted)) for j in range(len(wanted)) if wanted[i] < wanted[j]
    )


def test_stages_group_neighbours_by_prefix() -> None:
    names = [f"stages.{stage}.{block}.bn" for stage in range(3) for block in range(12)] + ["bn"]
    assert stages(names) == [("stages.0", 12), ("stages.1", 12), ("stages.2", 12), ("bn", 1)]
    assert stages([f"layer{index}" for index in range(20)]) == [("", 20)]
    assert stages([]) == [("", 0)]
