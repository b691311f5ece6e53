"""The planner: what speculation can bring, before anything is trained or bought.

``forerun plan`` calls it. The formulas are `forerun.engine.theory`'s, measured costs `forerun.engine.costs`'s; here are
data sheets of devices, the roofline, stated assumptions, and the verdict. Only `measured` and `trial` import torch.
"""
