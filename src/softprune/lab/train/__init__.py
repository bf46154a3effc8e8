"""Training: one loop for every method, its recipes, checkpoints and records.

Read `run.py` (`start`) first, then `trainer.py`, the loop, `stage.py`, what a cut replaces, and `step.py`, one step.
"""
