"""One process writes a run: `train` and `resume` hold its lock, reading needs none."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import metrics

from softprune.errors import CheckpointError
from softprune.lab.train.control import Listener
from softprune.lab.train.from_checkpoint import compact_run
from softprune.lab.train.run import resume, start

Tiny = Callable[..., object]


class Meanwhile(Listener):
    """Does something once, within the second epoch."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.done = act, False

    def on_epoch_start(self, epoch: int, epochs: int, steps: int) -> None:
        if epoch == 1 and not self.done:
            self.done = True
            self.act()


@pytest.mark.parametrize("begun", [False, True], ids=["train", "resume"])
def test_a_run_at_work_is_read_but_not_resumed(tiny: Tiny, tmp_path: Path, begun: bool) -> None:
    run = tmp_path / "run"

    def meanwhile() -> None:
        half = run / "checkpoints" / ".step-0000000060.ckpt.1.tmp"
        half.write_bytes(b"half")
        with pytest.raises(CheckpointError, match=r"Only one process may write a run at a time.*process \d+ on "):
            resume(run)
        compact_run(run, tmp_path / "small", model="tiny_networks:tiny")
        assert half.exists(), "who does not hold the lock deletes nothing"

    listener = Meanwhile(meanwhile)
    config = tiny("train.epochs=2", "method.strength=0.0")
    if begun:
        start(config, run, time_limit=0)
        assert resume(run, listener=listener).result is not None
    else:
        assert start(config, run, listener=listener).result is not None
    assert listener.done
    assert len(metrics(run)) == 2
    assert resume(run).result is not None  # the lock is free again


def test_the_dense_baseline_is_not_resumed_beside_its_run(tiny: Tiny, tmp_path: Path) -> None:
    def meanwhile() -> None:
        with pytest.raises(CheckpointError, match="Only one process may write a run at a time"):
            resume(tmp_path / "run" / "dense")

    listener = Meanwhile(meanwhile)
    start(tiny("train.epochs=2", "train.dense_baseline=true"), tmp_path / "run", listener=listener)
    assert listener.done


def test_a_finished_run_needs_no_lock(tiny: Tiny, tmp_path: Path) -> None:
    start(tiny("train.epochs=1"), tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink()
    assert resume(tmp_path / "run").result is not None
    assert not (tmp_path / "run" / ".lock").exists(), "it may lie on a read-only disk"
