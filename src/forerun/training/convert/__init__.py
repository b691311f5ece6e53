"""A loaded transformers model becomes one that trains its own EAGLE head: the API that ModelOpt users know.

Importing this imports no torch. Knows no data, no optimiser and no command line; transformers' `Trainer` brings them.
"""
