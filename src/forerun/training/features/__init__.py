"""Hidden states of the target for training draft heads: made while training (`online`) or stored first (`store`)."""
