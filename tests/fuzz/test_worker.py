"""What the fuzzer calls a finding. An oracle that finds nothing anywhere would be worthless."""

import ctypes
import mmap
import time
from pathlib import Path
from random import Random

import pytest
from fuzzing import worker
from fuzzing.mutations import mutate_bytes, mutate_json, mutate_pickle, mutate_toml
from fuzzing.worker import WrongResult, handle

from softprune.errors import DataError


def _accept(work: Path) -> str:
    assert Path.cwd() == work
    return "accepted"


def _refuse(work: Path) -> str:
    raise DataError("The data must be good. Got bad data.")


def _fail(work: Path) -> str:
    (work / "input").write_text("kept")
    raise KeyError("missing")


def _wrong(work: Path) -> str:
    raise WrongResult("1 is not 2")


def _crash(work: Path) -> str:
    return ctypes.string_at(0).decode()


def _allocate(work: Path) -> str:
    # Not from the heap: a test process that has freed as much before would not grow.
    memory = mmap.mmap(-1, 100 * 2**20)
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    return "accepted"


def _sleep(work: Path) -> str:
    time.sleep(60)
    return "accepted"


def _spin(work: Path) -> str:
    while True:
        pass


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (_accept, "accepted"),
        (_refuse, "refused"),
        (_fail, "traceback"),
        (_wrong, "wrong result"),
        (_crash, "crash"),
        (_allocate, "memory"),
        (_sleep, "hang"),
        (_spin, "hang"),
    ],
)
def test_outcomes(function, outcome, tmp_path, monkeypatch):
    if outcome == "hang":
        monkeypatch.setattr(worker, "SECONDS", 0.5)
    monkeypatch.setattr(worker, "MEMORY", 20 * 2**20)
    found = handle(function, tmp_path / "finding")
    assert found.outcome == outcome, found.detail
    assert (tmp_path / "finding").exists() == (outcome not in worker.GOOD)
    if function is _fail:
        assert (tmp_path / "finding" / "input" / "input").read_text() == "kept"
        assert "KeyError: 'missing'" in found.detail


def test_a_seed_gives_the_same_mutation_again():
    text = '{"a": [1, {"b": "c"}], "d": 1.5}'
    toml = 'a = 1\n[b]\nc = "d"\n'
    content = bytes(range(200))
    import pickle

    stored = pickle.dumps({"a": [1, 2], "b": b"c"})
    changed = 0
    for seed in range(50):
        for mutate, seedling in (
            (mutate_json, text),
            (mutate_toml, toml),
            (mutate_bytes, content),
            (mutate_pickle, stored),
        ):
            first, second = (mutate(Random(seed), seedling) for _ in range(2))
            assert first == second
            changed += first != seedling
    assert changed > 170
