"""Data to train drafters on: read it, mask it, store it, count it, pack it, and let the target write it anew.

`prepare` goes from files to a `PreparedData` directory, `PackedWindows` from there to batches. Knows no model and no
drafter, only tokenizers.
"""
