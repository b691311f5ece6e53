"""Lookup drafters: they propose what followed the same tokens before, without a forward pass."""
