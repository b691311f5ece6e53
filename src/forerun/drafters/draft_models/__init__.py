"""Drafters that run a second causal LM, with the tokenizer of the target or another."""
