"""The planner computes what speculation can bring, before anything is trained. Only `measured` and
`trial` import torch.
"""
