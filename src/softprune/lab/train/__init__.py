"""Training: one loop for every method, its checkpoints and records. Read `run.py`, then `step.py`."""
