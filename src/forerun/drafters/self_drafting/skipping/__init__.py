"""Sets of skipped sub-layers: their names, their file, and the searches for a good one, before and during decoding."""
