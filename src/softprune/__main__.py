"""Entry point of `python -m softprune` and of `torchrun -m softprune`."""

from softprune.lab.cli import main

if __name__ == "__main__":
    main()
