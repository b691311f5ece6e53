"""This package has what the objectives of heads and draft models share."""
