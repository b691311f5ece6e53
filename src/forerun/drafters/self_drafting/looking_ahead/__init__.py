"""The parts of Jacobi and lookahead decoding: the window of trajectories, a pool of n-grams, reading a scored tree."""
