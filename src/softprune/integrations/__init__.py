"""softprune in other people's loops. Each module needs its framework: import it by name.

`softprune.integrations.lightning.SoftPruning` is a Lightning callback. Hugging Face Accelerate, timm's loop and your
own need nothing from here: see examples/.
"""
