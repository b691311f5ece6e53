"""This package has one step of speculative decoding, and what a drafter is."""
