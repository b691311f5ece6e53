"""Speculative decoding itself: the token tree, sampling, rules, and the step that joins them."""
