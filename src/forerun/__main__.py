"""``python -m forerun`` is the command line."""

import sys

from forerun.cli import main

if __name__ == "__main__":
    sys.exit(main())
