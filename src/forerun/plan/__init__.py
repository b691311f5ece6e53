"""The planner: what speculation can bring, before anything is trained or bought. The formulas are
`forerun.engine.theory`'s, measured costs `forerun.engine.costs`'s; only `measured` and `trial` import torch."""
