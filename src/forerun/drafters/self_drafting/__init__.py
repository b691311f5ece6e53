"""Drafters that need no weights but the target's own."""
