"""How channels pass through operators: `registry.py` is the table, the others have a rule per kind of operator."""
