"""`python -m softprune`, which is also what torchrun starts."""

from softprune.cli import main

if __name__ == "__main__":
    main()
