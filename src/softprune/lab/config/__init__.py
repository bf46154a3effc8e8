"""Settings of a run, and the files that hold them. Imports no PyTorch.

`settings.py` has a class per section of a recipe, whose annotations are the rules; `recipes.py` finds, changes and
writes the files.
"""
