"""Data to train drafters on: read it, mask it, store it, count it, pack it, and let the target write it anew."""
