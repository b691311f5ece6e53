"""Hidden states of the target train draft heads: they are made while training (`online`) or stored
first (`store`).
"""
