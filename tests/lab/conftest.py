"""Run folders to read and to report on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic_runs as synthetic


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Writes a run folder as `softprune train` does; gives the folder and the record in it."""

    def make(name: str = "run", network: str = "digits_net", **options: Any) -> tuple[Path, dict[str, Any]]:
        options.setdefault("epochs", 12)
        return tmp_path / name, synthetic.make(tmp_path / name, network, **options)

    return make
