"""One-shot pruning: a trained network is ranked, cut to a budget and fine-tuned."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import metrics, tiny_config

from softprune.errors import ConfigError
from softprune.lab.config.settings import RunConfig
from softprune.lab.train.run import resume, start

Tiny = Callable[..., RunConfig]
ONE_SHOT = ("train.epochs=0", "method.name=l1", "method.target.macs=0.5", "finetune.epochs=2", "model.weights=dense")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: tiny_config(tmp_path, *overrides)


def test_a_trained_network_is_cut_to_a_budget_and_fine_tuned(tiny: Tiny, tmp_path: Path) -> None:
    dense = start(tiny("method.name=dense"), tmp_path / "dense").result
    result = start(tiny(*ONE_SHOT), tmp_path / "run").result
    assert dense is not None
    assert result is not None
    before, masked, compact = result.table
    assert before.top1 == dense.table[0].top1
    assert compact.macs <= 0.5 * before.macs
    assert compact.top1 is not None
    assert masked.top1 is not None
    assert compact.top1 >= masked.top1
    rows = metrics(tmp_path / "run")
    assert [row["phase"] for row in rows] == ["finetune"] * 2
    # The accuracy before the cut survives an interruption.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("softprune.lab.train.control.StopSignal.reason", lambda _: "a test")
        assert start(tiny(*ONE_SHOT), tmp_path / "again").stopped
    again = resume(tmp_path / "again").result
    assert again is not None
    assert again.table[0].top1 == before.top1
    assert metrics(tmp_path / "again") == rows


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("method.name=l1", "finetune.epochs=1"), "needs a trained network. Got random weights"),
        (("method.name=scp", "model.weights=x.pt"), "needs a method that ranks the channels .* Got scp"),
        (("method.name=l1", "model.weights=x.pt"), "needs finetune.epochs of at least 1"),
        (
            ("method.name=l1", "model.weights=x.pt", "finetune.epochs=1", "train.dense_baseline=true"),
            "train.dense_baseline needs train.dense_epochs",
        ),
    ],
)
def test_what_one_shot_needs_is_said(tiny: Tiny, tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny("train.epochs=0", *overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()
