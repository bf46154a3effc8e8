"""Damaged files are refused with a message: a few of the inputs of `make fuzz`."""

import importlib
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
