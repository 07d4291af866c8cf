"""Runs the command line, `python -m volta_fa <command>`, and exits with the status that `cli.main` returns."""

import sys

from volta_fa.cli import main

if __name__ == "__main__":
    sys.exit(main())
