"""A loaded transformers model becomes one that trains its own draft head: the API that ModelOpt users know."""
