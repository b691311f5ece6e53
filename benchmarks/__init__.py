"""Everything that compares forerun with others or with itself; not part of what is installed."""
