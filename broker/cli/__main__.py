"""`python -m broker.cli` is `headrace`."""

import sys

from broker.cli import main

if __name__ == "__main__":
    sys.exit(main())
