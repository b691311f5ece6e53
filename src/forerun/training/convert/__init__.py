"""A loaded transformers model becomes one that trains its own EAGLE head: the API that ModelOpt users know."""
