"""The proof of losslessness as a user's tool, on the user's own model: ``forerun certify``.

Uses the public API of the engine.
"""
