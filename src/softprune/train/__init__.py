"""Training: one loop for every method, its recipes, checkpoints and records."""
