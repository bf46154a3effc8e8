"""Which tests `make quick` leaves out: those listed in tests/slow.txt, by the CPU time that they took.

`make slow-list` measures all tests and rewrites the list. CPU time is measured, since it does not depend on what else
the machine does. A test that must stay in `make quick` whatever it takes is marked `quick`; one that must not is marked
`slow`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "slow.txt"
LIMIT = 0.15
"""CPU seconds of a test, setup included, above which it is slow."""


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


OTHER_PROCESSES = {"forking", "chromium"}
"""Fixtures whose tests are slow: the CPU time of a fork server's children and of a browser is not that of the test."""


class SlowTests:
    """Marks the tests of the list as slow, and measures them on request."""

    def __init__(self, record: str | None) -> None:
        self._record = Path(record) if record else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark the listed tests."""
        listed = set(LIST.read_text().splitlines()) if LIST.is_file() else set()
        for item in items:
            slow = _short_id(item) in listed or not OTHER_PROCESSES.isdisjoint(getattr(item, "fixturenames", ()))
            if slow and item.get_closest_marker("quick") is None:
                item.add_marker("slow")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Append a test's CPU time to the record."""
        before = _cpu_seconds()
        result = yield
        if self._record is not None:
            with open(self._record, "a") as file:
                file.write(f"{_cpu_seconds() - before:.2f}\t{_short_id(item)}\n")
        return result


def _short_id(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


def write_list(record: Path) -> None:
    """Write the tests of ``record`` that took more than LIMIT seconds to the list; others keep their place in it."""
    seconds = {}
    for line in record.read_text().splitlines():
        time, name = line.split("\t")
        seconds[name] = max(float(time), seconds.get(name, 0.0))
    kept = [name for name in LIST.read_text().splitlines() if name not in seconds] if LIST.is_file() else []
    slow = [name for name, time in seconds.items() if time > LIMIT]
    LIST.write_text("".join(f"{name}\n" for name in sorted({*kept, *slow})))


if __name__ == "__main__":
    import sys

    write_list(Path(sys.argv[1]))
