"""The same drafters on somebody else's engine: launch plans. Imports no torch."""
