"""Damaged files are refused with a message: a few of the inputs of `make fuzz`."""

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    return importlib.import_module("fuzz")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_damaged_files_have_no_findings(fuzz: ModuleType, tmp_path: Path) -> None:
    seeds = fuzz.make_seeds(tmp_path)
    for number in range(4):
        for kind in fuzz.FORMATS:
            assert fuzz.handle(f"{kind}:{number}", 1, seeds)[0] in ("accepted", "refused"), f"{kind}:{number}"


def test_what_is_wrong_is_a_finding(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, output, outcome in ((0, "", "accepted"), (2, "error: ...", "refused"), (1, "", "traceback")):
        monkeypatch.setattr(fuzz, "command", lambda *_, code=code, output=output: (code, output))
        assert fuzz.judged("train")[0] == outcome
    monkeypatch.setattr(fuzz, "command", lambda *_: 1 / 0)
    assert fuzz.judged("train")[0] == "traceback"


def test_a_seed_gives_the_same_damage_again(fuzz: ModuleType) -> None:
    content = b'{"a": [1, 2], "b": "c"}\n' * 5
    first, second = ([fuzz.damaged(random.Random(seed), content) for seed in range(50)] for _ in range(2))
    assert first == second
    assert sum(each != content for each in first) > 40
