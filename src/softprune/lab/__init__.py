"""The laboratory: recipes, the trainer, runs, reports, sweeps and the command line, on top of the library."""

import importlib.util

if importlib.util.find_spec("pydantic") is None or importlib.util.find_spec("typer") is None:
    raise ImportError('The command line and the trainer need the extra "lab": pip install "softprune[lab]"')
