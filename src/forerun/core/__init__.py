"""The parts of speculative decoding without a model: token trees, sampling, and verification rules."""
