"""Speed for a loaded target, without touching its modelling code; `accelerate` applies what fits."""
