"""Training: one loop for all methods, with checkpoints and records. Start with `run.py`, then read `step.py`."""
