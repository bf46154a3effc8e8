"""Integrations with training frameworks. Each module requires its framework and must be imported by name.

`lightning.SoftPruning` is a callback for Lightning, `transformers.SoftPruningCallback` for transformers' Trainer.
Hugging Face Accelerate, timm's training loop and your own loop need no integration: see examples/.
"""
