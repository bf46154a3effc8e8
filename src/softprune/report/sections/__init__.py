"""The parts of a run's page, one file each: markup, or ``None`` where the run has nothing to show."""
