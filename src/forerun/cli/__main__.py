"""``python -m forerun.cli``: the same as the ``forerun`` command."""

from forerun.cli import leave, main

leave(main())
