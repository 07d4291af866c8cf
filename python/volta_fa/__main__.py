"""`python -m volta_fa`."""

import sys

from volta_fa.cli import main

if __name__ == "__main__":
    sys.exit(main())
