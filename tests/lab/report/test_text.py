"""Numbers and names for readers, scales, labels that keep their distance."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softprune.lab.report import text
from softprune.lab.report.scales import Scale, apart, limits, num, quantile, tick_label, ticks
from softprune.lab.report.text import stages


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (text.short(313_201_664), "313 M"),
        (text.short(14_724_042), "14.7 M"),
        (text.short(9_996_000), "10.0 M"),
        (text.short(512), "512"),
        (text.short(None), "\N{EM DASH}"),
        (text.count(313_201_664), "313,201,664"),
        (text.file_size(58_896_168), "58.9 MB"),
        (text.percent(text.cut(200, 67)), "66.5 %"),
        (text.percent(-0.04), "0.0 %"),
        (text.change(-0.06), "\N{MINUS SIGN}0.06"),
        (text.change(0.06), "+0.06"),
        (text.change(0.001), "0.00"),
        (text.significant(-0.00012345), "\N{MINUS SIGN}0.000123"),
        (text.duration(411.3), "6 min 51 s"),
        (text.duration(7322), "2 h 02 min"),
        (text.milliseconds(4.1834), "4.18 ms"),
    ],
)
def test_numbers_as_a_reader_gets_them(written: str, wanted: str) -> None:
    assert written.replace("\N{NARROW NO-BREAK SPACE}", " ") == wanted


def test_a_cut_of_nothing_is_unknown() -> None:
    assert text.cut(0, 0) is None
    assert text.cut(None, 3) is None
    assert text.cut(4, 5) == -25.0


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_few_and_inside(low: float, span: float, wanted: int) -> None:
    found = ticks(low, low + span, wanted)
    slack = 1e-6 * max(abs(low), span)
    assert all(low - slack <= tick <= low + span + slack for tick in found)
    assert len(found) <= wanted + 1


def test_scales_and_limits() -> None:
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(0, 100, 0, 100, "error")(75) == 50
    assert Scale(1, 100, 0, 100, "log")(10) == 50
    assert Scale(0, 10, 0, 100).clamp(99) == 100
    assert Scale(3, 3, 0, 100)(3) == 50
    low, high = limits([5.0])
    assert low < 5 < high
    assert limits([*range(1000), 1e9], trim=0.01)[1] < 2000
    assert quantile([1, 2, 3, 4], 0.5) == 2.5
    assert [tick_label(tick, [0, 0.25, -0.5]) for tick in (0, 0.25, -0.5)] == ["0.00", "0.25", "\N{MINUS SIGN}0.50"]
    assert num(-0.001) == "0"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_keep_their_distance_and_order(wanted: list[float]) -> None:
    placed = apart(wanted, 10, 0, 100)
    ordered = sorted(placed)
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(ordered))
    assert all(0 <= place <= 100 for place in placed)
    assert all(placed[i] < placed[j] for i in range(len(wanted)) for j in range(len(wanted)) if wanted[i] < wanted[j])


def test_stages_group_neighbours_by_prefix() -> None:
    names = [f"stages.{stage}.{block}.bn" for stage in range(3) for block in range(12)] + ["bn"]
    assert stages(names) == [("stages.0", 12), ("stages.1", 12), ("stages.2", 12), ("bn", 1)]
    assert stages([f"layer{index}" for index in range(20)]) == [("", 20)]
    assert stages([]) == [("", 0)]
