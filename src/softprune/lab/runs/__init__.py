"""Runs on disk. Start with `folder.py` (the files of a run) and `result.py` (the records in them)."""
