"""Drafters that are made of other drafters."""
