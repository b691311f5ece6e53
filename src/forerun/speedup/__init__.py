"""One command goes from a model to a measured speed-up: prompts, completions, free drafters, a head, a page."""
