"""The training loop for any drafter: data by position, gradients exact for any number of processes, safe checkpoints.

Knows no drafter, no data and no loss: those are the `Batches` and the `Objective` of `forerun.training.batch`.
"""
