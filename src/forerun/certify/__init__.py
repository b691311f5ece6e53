"""The proof of losslessness as a user's tool, on the user's own model and through the engine's public API."""
