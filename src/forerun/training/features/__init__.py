"""Hidden states of the target for training draft heads: made while training (`online`) or stored first (`store`).

Importing this imports nothing of them. Boundary ids are forerun's everywhere.
"""
