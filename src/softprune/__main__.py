"""`python -m softprune`, which is also what torchrun starts."""

from softprune.lab.cli import main

if __name__ == "__main__":
    main()
