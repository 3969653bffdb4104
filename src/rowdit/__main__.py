"""`python -m rowdit`: the same as the command `rowdit`."""

import sys

from rowdit.cli import main

if __name__ == "__main__":  # a worker process imports this module under another name
    sys.exit(main())
