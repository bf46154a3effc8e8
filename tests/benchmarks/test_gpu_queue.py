"""The queue of a GPU session, with jobs of milliseconds."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks_gpu import script

run_jobs = script("run_jobs")


def sh(name: str, command: str = "true", **more: Any) -> Any:
    return run_jobs.Job(name, ["sh", "-c", command], **more)


def run(jobs: list[Any], root: Path, seconds: float = 20.0, most: int = 3) -> tuple[Any, list[str]]:
    queue = run_jobs.Queue(jobs, root, seconds, most)
    queue.run(poll=0.01)
    assert (root / "finished").exists()
    return queue, [line[7:] for line in (root / "queue.log").read_text().splitlines()]


def test_jobs_wait_for_files_and_for_other_jobs(tmp_path: Path) -> None:
    file = tmp_path / "made"
    order = tmp_path / "order"
    jobs = [
        sh("needs", f"echo needs >> {order}", needs=[str(file)]),
        sh("after", f"echo after >> {order}", after=["needs"]),
        sh("makes", f"sleep 0.1; echo makes >> {order}; touch {file}"),
    ]
    queue, _ = run(jobs, tmp_path)
    assert order.read_text().split() == ["makes", "needs", "after"]
    assert queue.codes == {"makes": 0, "needs": 0, "after": 0}


def test_a_job_that_cannot_finish_is_not_started_unless_it_can_be_resumed(tmp_path: Path) -> None:
    jobs = [sh("long", minutes=9.0), sh("short", minutes=4.0), sh("kept", minutes=9.0, resumable=True)]
    queue, log = run(jobs, tmp_path, seconds=400.0, most=1)
    assert [line for line in log if line.startswith("start")] == ["start short beside 0", "start kept beside 0"]
    assert "not started long" in log
    assert "long" not in queue.codes


def test_jobs_side_by_side_slow_each_other_down_until_one_ends() -> None:
    share = run_jobs.SHARING
    assert run_jobs.ends({"a": [10.0, 100.0]}) == {"a": 110.0}
    then = run_jobs.ends({"short": [0.0, 100.0], "long": [0.0, 300.0]})
    assert then == {"short": pytest.approx(100 * (1 + share)), "long": pytest.approx(100 * (1 + share) + 200)}


def test_a_job_does_not_start_if_one_that_runs_would_be_late(tmp_path: Path) -> None:
    jobs = [sh("runs", minutes=5.0), sh("short", minutes=2.0), sh("kept", minutes=2.0, resumable=True)]
    (tmp_path / "logs").mkdir()
    queue = run_jobs.Queue(jobs, tmp_path, 335.0, 3)
    queue.step()
    assert list(queue.left) == ["runs"]
    queue.running["runs"][0].wait()
    queue.step()
    assert list(queue.left) == ["short", "kept"]
    for process, _ in queue.running.values():
        process.wait()


@pytest.mark.parametrize(("epochs", "starts"), [(30, True), (10, False)])
def test_a_job_does_not_start_beside_one_that_is_slower_than_predicted(
    tmp_path: Path, epochs: int, starts: bool
) -> None:
    (tmp_path / "logs").mkdir()
    metrics = tmp_path / "metrics.jsonl"
    jobs = [
        sh("runs", "sleep 60", folder=str(tmp_path), epochs=100, minutes=10.0),
        sh("next", minutes=1.0, needs=[str(tmp_path / "wanted")]),
    ]
    now = 0.0
    queue = run_jobs.Queue(jobs, tmp_path, 800.0, 3, lambda: now)
    queue.step()
    for done in range(epochs + 1):  # 30 epochs are as predicted, 10 take three times as long
        now = 6.0 + 180.0 * done / epochs
        metrics.write_text("{}\n" * (done + 1))
        queue.step()
    (tmp_path / "wanted").touch()
    queue.step()
    assert (list(queue.left) == ["runs", "next"]) is starts
    for process, _ in queue.running.values():
        process.kill()
        process.wait()


def test_the_deadline_stops_jobs_with_sigterm(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    begin = time.monotonic()
    jobs = [sh("saves", f"trap 'touch {saved}; exit 75' TERM; while :; do sleep 0.02; done"), sh("next")]
    queue, log = run(jobs, tmp_path, seconds=0.3, most=1)
    assert saved.exists()
    assert queue.codes == {"saves": 75}
    assert log[-2:] == ["not started next", "all done"]
    assert time.monotonic() - begin < 5


def test_a_job_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_jobs, "GRACE", 0.1)
    queue, _ = run([sh("stays", "trap '' TERM; while :; do sleep 0.02; done")], tmp_path, seconds=0.2)
    assert queue.codes == {"stays": -9}


def test_a_crash_is_resumed_once_and_a_second_one_is_final(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make = f"mkdir {folder}; touch {folder}/config.toml; exit 3"
    jobs = [
        sh("crashes", make, folder=str(folder), resume=["sh", "-c", "true"]),
        sh("fails", "exit 3"),
        sh("then", after=["fails"]),
    ]
    queue, log = run(jobs, tmp_path)
    assert queue.codes == {"crashes": 0, "fails": 3, "then": 1}
    assert "resume crashes beside 1" in log or "resume crashes beside 0" in log
    assert "not started then since a job before it failed" in log


def test_a_job_alone_has_nothing_beside_it(tmp_path: Path) -> None:
    _, log = run([sh("alone", "sleep 0.05", alone=True), sh("a", "sleep 0.05"), sh("b")], tmp_path)
    assert log[0] == "start alone beside 0"
    assert log.index("end alone 0") < log.index("start a beside 0") < log.index("start b beside 1")


def test_a_brief_job_does_not_wait_for_a_place(tmp_path: Path) -> None:
    _, log = run([sh("long", "sleep 0.2"), sh("next"), sh("brief", brief=True)], tmp_path, most=1)
    assert log[:2] == ["start long beside 0", "start brief beside 1"]
    assert log.index("end long 0") < log.index("start next beside 0")


def test_a_list_with_an_unknown_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([{"name": "a", "command": ["true"], "after": ["b"]}]))
    with pytest.raises(SystemExit, match="Got b"):
        run_jobs.read_jobs(path)
