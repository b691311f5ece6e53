"""The training loop: `trainer.train` takes an objective, data and settings, and knows nothing of drafting."""
