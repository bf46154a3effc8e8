"""The laboratory: recipes, the trainer, runs, reports, sweeps and the command line, on top of the library."""
