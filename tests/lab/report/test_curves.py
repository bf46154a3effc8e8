"""What the curves mark and read out."""

from typing import Any

from softprune.lab.report.curves import ACCURACY, REMOVED, Panel, Series, curves, events_of
from softprune.lab.runs.result import Epoch


def rows(rates: list[float], tuned_from: int = 99) -> list[Epoch]:
    return [
        Epoch(
            epoch=e,
            step=e + 1,
            phase="finetune" if e >= tuned_from else "train",
            lr=lr,
            train_loss=None,
            train_top1=0.0,
            seconds=1.0,
            images_per_second=1.0,
            channels=1,
            params=1,
            macs=1,
        )
        for e, lr in enumerate(rates)
    ]


def test_steps_of_the_learning_rate_are_marked_and_smooth_schedules_are_not() -> None:
    assert events_of(rows([0.1, 0.1, 0.01, 0.01, 0.001])) == [(3, "lr 0.01"), (5, "lr 0.001")]
    assert events_of(rows([0.1 * 0.8**epoch for epoch in range(20)])) == []
    assert events_of(rows([0.02, 0.06, 0.1, 0.1, 0.02, 0.02])) == [(5, "lr 0.02")]  # after a warm-up
    assert events_of([]) == []


def test_the_start_of_fine_tuning_is_marked() -> None:
    assert events_of(rows([0.1, 0.1, 0.01, 0.01, 0.01], tuned_from=3)) == [(3, "lr 0.01"), (4, "fine-tuning")]


def drawn(lines: list[Series], **options: Any) -> dict[str, Any]:
    found = curves(lines, "t", "d", **options)
    assert found is not None
    return found


def test_a_chart_without_values_is_none() -> None:
    assert curves([], "t", "d") is None
    assert curves([Series("unknown", "g0", ACCURACY, [(0, None)])], "t", "d") is None


def test_lines_of_different_length_are_read_out_over_all_epochs() -> None:
    long = Series("long", "g0", ACCURACY, [(0, 1.0), (1, None), (2, 3.0)])
    late = Series("late", "g1", REMOVED, [(2, 5.0), (3, 6.123)])
    hidden = Series("", "g1 thin", REMOVED, [(2, 1.0)], background=True)
    data = drawn([long, late])["data"]
    assert data["x"] == [0, 1, 2, 3]
    assert [series["y"] for series in data["series"]] == [[1.0, None, 3.0, None], [None, None, 5.0, 6.12]]
    assert drawn([long, hidden])["data"]["series"][0]["y"] == [1.0, None, 3.0]


def test_a_single_epoch_is_drawn_and_a_gap_is_bridged() -> None:
    one = Series("one", "s-test", ACCURACY, [(0, 50.0)])
    gap = Series("gap", "s-train", ACCURACY, [(0, 50.0), (1, None), (2, 51.0)])
    for drawing in drawn([one])["drawings"]:
        assert "nan" not in str(drawing)
    for drawing in drawn([gap])["drawings"]:
        path = drawing["panels"][0]["paths"][0][1]
        assert (path.count("M"), path.count("L")) == (1, 1)


def test_every_value_lies_inside_its_panel() -> None:
    climb = Series("climb", "g0", ACCURACY, [*enumerate((9.8, 31.0, *(90 + 0.1 * e for e in range(38))))])
    rate = Series("lr", "g1", Panel("learning rate", "log"), [(0, 0.1), (1, 0.01), (2, 1e-4)])
    lines = [climb, rate]
    for drawing in drawn(lines, mark=(39, 93.7, "best"))["drawings"]:
        for panel, line in zip(drawing["panels"], lines, strict=True):
            scale = panel["scale"]
            assert scale.warp == ("error" if line is climb else "log")
            assert all(scale.end <= scale(value) <= scale.start for value in line.known)
            assert all(scale.end - 1 <= y <= scale.start + 1 for y, _ in scale.marks)
