"""``python -m forerun.cli``: the same as the ``forerun`` command."""

import sys

from forerun.cli import main

sys.exit(main())
