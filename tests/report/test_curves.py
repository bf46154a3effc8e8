"""What the curves mark and read out."""

from softprune.report.curves import ACCURACY, REMOVED, Mark, Panel, Series, curves, events_of
from softprune.runs.result import Epoch


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


def test_lines_of_different_length_are_read_out_over_all_epochs() -> None:
    long = Series("long", "g0", ACCURACY, (0, 1, 2), (1.0, None, 3.0))
    late = Series("late", "g1", REMOVED, (2, 3), (5.0, 6.123))
    hidden = Series("", "g1 thin", REMOVED, (2,), (1.0,), background=True)
    data = curves("c", [long, late], "t", "d")["data"]
    assert data["x"] == [0, 1, 2, 3]
    assert [series["y"] for series in data["series"]] == [[1.0, None, 3.0, None], [None, None, 5.0, 6.12]]
    assert curves("c", [long, hidden], "t", "d")["data"]["series"][0]["y"] == [1.0, None, 3.0]


def test_a_single_epoch_and_a_gap_are_drawn() -> None:
    one = Series("one", "s-test", ACCURACY, (0,), (50.0,))
    gap = Series("gap", "s-train", ACCURACY, (0, 1, 2), (50.0, None, 51.0))
    for drawing in curves("c", [one], "t", "d", end_labels=True)["drawings"]:
        assert "nan" not in str(drawing)
    for drawing in curves("c", [gap], "t", "d")["drawings"]:
        assert drawing["panels"][0]["paths"][0]["d"].count("h0") == 2  # a dot on either side of the gap


def test_every_value_lies_inside_its_panel() -> None:
    climb = Series("climb", "g0", ACCURACY, tuple(range(40)), (9.8, 31.0, *(90 + 0.1 * e for e in range(38))))
    rate = Series("lr", "g1", Panel("learning rate", "log"), (0, 1, 2), (0.1, 0.01, 1e-4))
    lines = [climb, rate]
    for drawing in curves("c", lines, "t", "d", mark=Mark(39, 93.7, "best"))["drawings"]:
        for panel, line in zip(drawing["panels"], lines, strict=True):
            scale = panel["scale"]
            assert scale.warp == ("error" if line is climb else "log")
            assert all(scale.end <= scale(value) <= scale.start for value in line.known)
            assert all(scale.end - 1 <= y <= scale.start + 1 for y, _ in panel["marks"])
