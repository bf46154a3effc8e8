"""Kernels beyond pruning, for inference and for training. Nothing in the core imports them."""
