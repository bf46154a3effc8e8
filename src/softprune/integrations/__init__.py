"""softprune in other people's loops. Each module needs its framework: import it by name.

`lightning.SoftPruning` is a Lightning callback, `transformers.SoftPruningCallback` one for transformers' Trainer.
Hugging Face Accelerate, timm's loop and your own need nothing from here: see examples/.
"""
