"""One command goes from a model to a measured speed-up: prompts, answers, what is free, a head if it pays, a page."""
