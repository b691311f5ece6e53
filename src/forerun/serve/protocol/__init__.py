"""Request bodies of each API as pydantic models, and error envelopes."""
