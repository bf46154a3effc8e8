"""Several runs from one file. `grid.py` reads it, `runner.py` runs it through an executor of `executor.py`."""
