"""Speculative decoding itself: the token tree, sampling, verification rules, and the step that
joins them.
"""
