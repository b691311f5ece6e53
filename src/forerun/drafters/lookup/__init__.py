"""Drafters that copy what followed the same tokens before, without a forward pass."""
