"""Engines that `forerun deploy` knows: one file each, and one line in `deploy.launch.ENGINES`."""
