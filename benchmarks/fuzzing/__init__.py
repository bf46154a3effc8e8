"""Fuzzing of every file that softprune reads: seed files, mutations, formats, and processes with limits."""
