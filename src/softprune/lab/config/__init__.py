"""Settings of a run and the TOML files that hold them. Does not import PyTorch.

`settings.py` has one class per section of a recipe, validated by its annotations. `recipes.py` finds, reads, changes
and writes the files.
"""
