"""`python -m hermetic` is the `hermetic` command."""

from hermetic.cli import main

if __name__ == "__main__":
    main()
