"""This package turns a loaded transformers model into one that trains its own draft head, by the
API of ModelOpt.
"""
