"""What a GPU session is prepared with: prices, a plan, and what travels with each call."""

import json
import statistics
import tarfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks_gpu import script

prices, plan, prepare = script("prices"), script("plan"), script("prepare")
Job = plan.Job


def test_prices_agree_with_the_times_of_the_records() -> None:
    checks = prices.checks()
    ratios = {check.name: check.predicted / check.measured for check in checks}
    vggs = [ratio for name, ratio in ratios.items() if "vgg" in name]
    assert len(vggs) >= 9
    assert all(0.9 < ratio < 1.12 for ratio in vggs), ratios
    assert all(0.9 < ratio < 1.5 for ratio in ratios.values()), ratios
    assert statistics.median(ratios.values()) == pytest.approx(1.0, abs=0.1)


def test_runs_side_by_side_are_as_fast_as_the_ledger_says() -> None:
    def epoch(model: str, beside: int) -> float:
        return 782 / 1000 * prices.timed()[model][0] * (1 + prices.SHARING * beside)

    assert sum(3 * 50_000 / epoch(model, 5) for model in ("vgg16", "vgg19")) == pytest.approx(80_000, rel=0.05)
    assert 160 * epoch("densenet40", 2) / 3 == pytest.approx(309, rel=0.05)
    seven = 7 * 50_000 / (epoch("resnet56", 6) * 2 ** (prices.BATCH - 1))
    assert seven == pytest.approx(52_000, rel=0.25)


def test_fine_tuning_costs_less_than_training_and_float32_more() -> None:
    wanted = prepare.missing.planned()
    price = wanted["cifar100-vgg19-slimming-high-ft"].price
    assert prices.FIXED * price.train < price.finetune < 0.9 * price.train
    bf16, fp32 = (wanted[f"cifar100-vgg16-scp{end}"].price.work for end in ("", "-float32"))
    assert fp32 == pytest.approx(prices.FLOAT32 * bf16)
    with pytest.raises(SystemExit, match="Got convnet"):
        prices.price(prepare.missing.load_recipe("digits", ["model.name=convnet"]))


def _job(name: str, minutes: float, **more: Any) -> Any:
    return Job(name, ["true"], folder=f"/tmp/g/runs/{name}", minutes=minutes, **more)


def test_a_plan_follows_the_rules_of_the_queue() -> None:
    jobs = [
        _job("source", 4.0),
        Job("fork", ["true"], needs=["/tmp/g/runs/source/checkpoints/step-9.ckpt"], brief=True),
        _job("forked", 2.0, after=["fork"], needs=["/tmp/g/data/cifar-100-python"]),
        _job("too-long", 9.0),
        _job("kept", 9.0, resumable=True),
    ]
    found = plan.Plan(jobs, 500.0, 1)
    found.run(poll=1.0)
    assert found.codes == {"source": 0, "fork": 0, "forked": 0, "kept": 75}
    assert [line for line in found.lines if "fork " in line] == ["   120 start fork beside 1", "   121 end fork 0"]
    assert "   240 start forked beside 0" in found.lines
    assert "   360 start kept beside 0" in found.lines
    assert found.unfinished == {"kept": pytest.approx(9 - 140 / 60)}
    assert "not started too-long" in found.lines[-2]


def test_the_next_session_continues_what_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.missing, "measured", lambda: {("cifar100-vgg16-scp", 0)})
    wanted = [("cifar100-vgg16-scp-queue", 0), ("cifar100-densenet40-scp", 0)]
    first, second = prepare.sessions(wanted, 2, 500.0, 1, None)
    assert first.codes == {"cifar100-vgg16-scp-queue-s0": 0, "cifar100-densenet40-scp-s0": 75}
    assert second.codes == {"cifar100-densenet40-scp-s0": 0}
    assert prepare.report(second).endswith("1 runs end, 2 rows of the paper's tables")
    assert "stopped" in prepare.report(first)


def test_one_command_writes_the_jobs_and_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = {}

    def pack(out: Path, sets: dict[str, Path], runs: Path | None, most: int) -> list[Path]:
        packed.update(sets)
        part = out.with_name(f"{out.name}-1")
        part.mkdir()
        (part / "file").write_bytes(bytes(1000))
        return [part]

    monkeypatch.setattr(prepare.missing, "measured", set)
    monkeypatch.setattr(prepare, "REPOSITORY", tmp_path)
    monkeypatch.setattr(prepare, "tree_size", lambda: 10_000)
    monkeypatch.setattr(prepare.data, "pack", pack)
    (tmp_path / "gpu-wheels").mkdir()
    (tmp_path / "gpu-data-2").mkdir()  # of an earlier session
    options = ["--data", "D", "--seconds", "700", "--only", "*-vgg16-scp-queue", "--only", "tiny*-sss"]
    prepare.main([*options, "--first", "cifar100-vgg19-scp-norelu"])
    jobs = json.loads((tmp_path / "gpu-job" / "jobs.json").read_text())
    names = ["cifar100-vgg19-scp-norelu-s0", "cifar100-vgg16-scp-queue-s0", "tinyimagenet-resnet50-sss-s0"]
    assert [job["name"] for job in jobs] == names
    sets = [[Path(path).name for path in job["needs"]] for job in jobs]
    assert sets == [["cifar-100-python"], ["cifar-100-python"], ["tinyimagenet", "cifar-100-python"]]
    evaluations = [part for job in jobs for part in job["command"] if "eval_epochs" in part]
    assert evaluations == [f"records.eval_epochs={number}" for number in (1, 1, 4)]
    assert packed == {"cifar100": Path("D"), "tinyimagenet": Path("D/tinyimagenet")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-data-1", "gpu-job", "gpu-wheels"]
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("bash")]
    scripts = ["start.sh 700 6", *["wait.sh 290"] * 3]
    assert lines == [f"bash benchmarks/gpu/{each}" for each in scripts]
    prepare.main([*options, "--first", "tinyimagenet-resnet50-sss"])
    jobs = json.loads((tmp_path / "gpu-job" / "jobs.json").read_text())
    sets = [[Path(path).name for path in job["needs"]] for job in jobs]
    assert sets == [["tinyimagenet"], ["cifar-100-python", "tinyimagenet"]]
    monkeypatch.setattr(prepare, "LIMIT", 12_000)
    with pytest.raises(SystemExit, match="must stay within 12,000 bytes"):
        prepare.main(options)
    with pytest.raises(SystemExit, match="--first must name runs"):
        prepare.main(["--first", "nothing"])
    with pytest.raises(SystemExit, match="--runs must be a folder"):
        prepare.main(["--runs", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="No run"):
        prepare.main(["--only", "nothing"])


def test_only_what_git_would_send_counts() -> None:
    assert 1e6 < prepare.tree_size() < prepare.LIMIT / 4


def test_files_count_as_they_do_in_an_archive(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, length in (("empty", 0), ("folder/full", 512), ("folder/more", 513)):
        (tmp_path / name).write_bytes(bytes(length))
    archive = tmp_path / "files.tar"
    with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in (tmp_path / "empty", tmp_path / "folder" / "full", tmp_path / "folder" / "more"):
            tar.add(path, path.name)
        used = tar.offset
    archive.unlink()
    assert prepare.archived(tmp_path.rglob("*")) == used == 3072
