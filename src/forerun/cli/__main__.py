"""``python -m forerun.cli`` does the same as the ``forerun`` command."""

from forerun.cli import leave, main

leave(main())
