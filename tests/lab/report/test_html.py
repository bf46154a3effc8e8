"""Numbers for readers, charts and tables as HTML."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softprune.lab.report import text
from softprune.lab.report.html import Axis, Column, Series, axis, curves, scatter, table


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (text.short(313_201_664), "313 M"),
        (text.short(9_996_000), "10.0 M"),
        (text.short(None), "-"),
        (text.file_size(58_896_168), "58.9 MB"),
        (text.percent(text.cut(200, 67)), "66.5%"),
        (text.percent(-0.04), "0.0%"),
        (text.percent(text.cut(0, 0)), "-"),
        (text.known_as("resnet164"), "ResNet-164"),
    ],
)
def test_numbers_as_a_reader_gets_them(written: str, wanted: str) -> None:
    assert written == wanted


@given(
    st.lists(st.integers(-(10**9), 10**9).map(lambda value: value / 1000), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_an_axis_shows_every_value_between_few_round_ticks(values: list[float], from_zero: bool, log: bool) -> None:
    found = axis(values, from_zero=from_zero, log=log)
    assert all(-1e-6 <= found(value) <= 100 + 1e-6 for value in values)
    assert len(found.ticks) <= 30
    assert all(-1e-6 <= found(tick) <= 100 + 1e-6 for tick in found.ticks)
    assert found.low < found.high


def test_axes() -> None:
    assert axis([0.1, 0.01, 1e-4], log=True).ticks == [1e-4, 1e-3, 1e-2, 0.1]
    assert axis([3.0], from_zero=True).low == 0
    climb = [9.8, *(90 + 0.1 * epoch for epoch in range(39))]
    assert axis(climb).low < 9.8
    assert 85 < axis(climb, zoom=True).low < 91  # the first epochs would hide the differences between the last ones
    assert Axis(0, 10, ())(2.5) == 25


def points(chart: str) -> list[list[tuple[float, float]]]:
    """Return the points of the lines of a chart."""
    paths = re.findall(r'<path d="M([^"h]+)" class="s-', chart)
    return [[tuple(map(float, place.split())) for place in path.split("L")[1:]] for path in paths]


def test_curves_bridge_gaps_and_read_out_every_epoch() -> None:
    long = Series("long", "s-test", [(1, 1.0), (2, None), (3, 3.0)])
    late = Series("late", "s-train", [(3, 5.0), (4, 6.123)])
    chart = curves("t", [long, late, Series("unknown", "s-dense", [(1, None)])], events=[(3, "fine-tuning")])
    assert [[x for x, _ in line] for line in points(chart)] == [[0, 66.67], [66.67, 100]]
    said = re.findall(r"<title>(epoch.*?)</title>", chart, re.DOTALL)
    assert said == ["epoch 1\nlong: 1", "epoch 2\n", "epoch 3\nlong: 3\nlate: 5", "epoch 4\nlate: 6.123"]
    assert "fine-tuning" in chart
    assert "unknown" not in chart
    assert curves("t", []) == curves("t", [Series("unknown", "s-test", [(1, None)])]) == ""
    assert "nan" not in curves("t", [Series("one", "s-test", [(1, 50.0)])])


def test_a_scatter_has_each_run_its_mean_and_the_front() -> None:
    groups = [Series("<a>", "g0", [(1.0, 90.0), (3.0, 92.0)]), Series("b", "g1", [])]
    chart = scatter("t", "ms", groups, Series("dense", "", [(4.0, 93.0)]), [(2.0, 91.0)])
    assert [chart.count(f'class="{kind}') for kind in ("point", "mean", "ring")] == [2, 1, 1]
    assert "&lt;a&gt;: 91.00%, 2 ms" in chart
    assert scatter("t", "ms", groups[1:], Series("dense", "", []), []) == ""


def test_a_table_has_numbers_as_values_and_escapes_text() -> None:
    columns = [Column("name", lambda row: row[0]), Column("n", lambda row: row[1], text.short)]
    found = table("<caption>", columns, [("<b>", 1_234_567), ("\u202e", None)])
    assert '<th scope="row">&lt;b&gt;</th><td class="n" data-value="1234567">1.23 M</td>' in found
    assert "\\u202e" in found
    assert '<td class="n">-</td>' in found
