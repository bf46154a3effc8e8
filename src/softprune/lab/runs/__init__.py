"""A run on disk. Read `folder.py` first, its files, and `result.py`, the records in them."""
