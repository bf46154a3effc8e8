"""Runs that share a training: the second begins with a checkpoint of the first."""

from pathlib import Path

import pytest
from benchmarks_gpu import script
from tiny import metrics, tiny_config

from softprune.lab.train.run import absolute_paths, resume, start

fork, jobs = script("fork"), script("jobs")

SLIMMING = ("method.name=slimming", "method.strength=1e-4", "train.epochs=3", "finetune.epochs=1")


def test_a_forked_run_has_the_record_of_one_that_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = (*SLIMMING, "records.checkpoint_epochs=2")
    first, second = (
        absolute_paths(tiny_config(tmp_path, *settings, f"method.options.ratio={ratio}")) for ratio in (0.3, 0.6)
    )
    source = start(first, tmp_path / "source").folder
    before, after = sorted(source.checkpoints.glob("*.ckpt"))
    with pytest.raises(SystemExit, match="before its network is cut"):
        fork.fork(source, tmp_path / "forked", second)
    after.unlink()  # a run is forked while it trains
    assert before.is_file()
    with pytest.raises(SystemExit, match="must be trained as"):
        fork.fork(source, tmp_path / "forked", second.replace(seed=1))
    assert not (tmp_path / "forked").exists()
    fork.fork(source, tmp_path / "forked", second)
    forked, alone = resume(tmp_path / "forked").result, start(second, tmp_path / "alone").result
    assert forked is not None
    assert alone is not None
    assert forked.compact == alone.compact
    assert forked.compact != source.read_result().compact
    assert forked.config == second
    assert metrics(tmp_path / "forked") == metrics(tmp_path / "alone")


def test_the_second_ratio_of_slimming_waits_for_a_checkpoint_of_the_first(tmp_path: Path) -> None:
    names = ["cifar100-vgg16-slimming-ft", "cifar100-vgg16-scp", "cifar100-vgg16-slimming-high-ft"]
    found = {job.name: job for job in jobs.jobs([(name, 0) for name in names], root=tmp_path)}
    first, second = found["cifar100-vgg16-slimming-ft-s0"], found["cifar100-vgg16-slimming-high-ft-s0"]
    begin = found["fork-cifar100-vgg16-slimming-high-ft-s0"]
    assert len(found) == 4
    assert "records.checkpoint_epochs=159" in first.command
    assert begin.needs == [f"{first.folder}/checkpoints/step-{159 * 782:010d}.ckpt"]
    assert begin.command[2:5] == [first.folder, second.folder, "cifar100-vgg16-slimming-high-ft"]
    assert begin.brief
    assert second.after == [begin.name]
    assert 0.3 * first.minutes < second.minutes < 0.5 * first.minutes
