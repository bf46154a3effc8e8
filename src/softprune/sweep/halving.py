"""Early stopping of a search: asynchronous successive halving (ASHA, Li et al. 2020) on the metrics that runs write.

Pareto dominance takes the place of one score, so that a trial that prunes more is not dropped for its accuracy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from softprune.errors import FileFormatError
from softprune.runs.result import read_metrics
from softprune.sweep.jobs import Job
from softprune.sweep.search import Search


@dataclass
class Halving:
    """Ends trials early."""

    search: Search
    _seen: dict[tuple[str, int], dict[str, tuple[float, int]]] = field(default_factory=dict)
    """For every run of the file and every rung: top-1 and MACs of the trials that reached it."""
    _sizes: dict[str, int] = field(default_factory=dict)

    def drop_losers(self, jobs: Iterable[Job]) -> None:
        """Read the metrics of all trials, and drop those that run and are not among the best at their newest rung."""
        for job in jobs:
            if job.state in ("waiting", "blocked"):
                continue
            try:
                size = job.cell.folder.metrics.stat().st_size
                if self._sizes.get(job.cell.name) == size:
                    continue  # no epoch has ended since the last look
                self._sizes[job.cell.name] = size
                rows = {row.number: row for row in read_metrics(job.cell.folder.metrics)[0]}
            except (OSError, FileFormatError):
                continue  # nothing yet, or damaged: the run itself reports it
            for rung in self.search.rungs(job.cell.config.train.epochs):
                seen = self._seen.setdefault((job.cell.run, rung), {})
                row = rows.get(rung)
                if row is None or row.test_top1 is None or job.cell.name in seen:
                    continue
                seen[job.cell.name] = (row.test_top1, row.macs)
                if job.state == "running" and not self._continues(job.cell.name, seen):
                    job.drop({"epoch": rung, "top1": row.test_top1, "macs": row.macs, "trials": len(seen)})
                    break

    def _continues(self, name: str, seen: Mapping[str, tuple[float, int]]) -> bool:
        """Return whether a trial is not dominated, or among the best 1 / factor by the number that dominate it."""

        def dominators(one: str) -> int:
            top1, macs = seen[one]
            return sum(
                other_top1 >= top1 and other_macs <= macs and (other_top1, other_macs) != (top1, macs)
                for other_top1, other_macs in seen.values()
            )

        own = dominators(name)
        better = sum(dominators(other) < own for other in seen)
        return own == 0 or better < len(seen) / self.search.factor
