"""Softly prune channels while training, then cut them for good."""

__version__ = "0.1.0"
