"""`python -m tokenspeed` is the command line."""

import sys

from tokenspeed.cli import main

if __name__ == "__main__":
    sys.exit(main())
