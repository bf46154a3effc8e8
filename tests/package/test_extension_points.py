"""What is added is documented and tested, and what is listed exists."""

import re
from pathlib import Path

from softprune import models
from softprune.lab.data import DATASETS

ROOT = Path(__file__).parents[2]


def test_every_data_set_is_documented() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    assert not [name for name in DATASETS if f"`{name}`" not in text]


def test_every_network_has_its_counts_tested() -> None:
    text = (ROOT / "tests" / "models" / "test_dense_counts.py").read_text()
    missing = [name for name in models.REGISTRY if name not in text]
    assert not missing


def test_the_list_of_slow_tests_names_tests() -> None:
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        path, _, name = line.partition("[")[0].partition("::")
        assert re.search(rf"^ *def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE), line
