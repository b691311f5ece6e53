"""The same drafters on somebody else's engine: launch plans, and plug-ins. Imports no torch."""

COPYING = ("ngram", "suffix", "rest", "prediction", "first_of", "merge")
"""Drafters for a plug-in, which is handed a sequence's text and nothing of the target; the last two made of such alone.
`recycling` copies, too, but what the target thought likely."""
