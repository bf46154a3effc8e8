"""Command line, trainer, recipes, runs, reports and sweeps, built on the library."""

import importlib.util

if importlib.util.find_spec("pydantic") is None or importlib.util.find_spec("typer") is None:
    raise ImportError('The command line and the trainer need the extra "lab": pip install "softprune[lab]"')
