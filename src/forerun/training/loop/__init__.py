"""The training loop takes an objective, data and settings (`trainer.train`), and knows nothing of
drafting.
"""
