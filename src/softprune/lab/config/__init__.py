"""Settings of a run, and the files that hold them. Imports no PyTorch.

Read `settings.py` first: a class per section of a recipe. `schema.py` is the base of these classes and words their
errors; `recipes.py` finds, changes and writes the files.
"""
