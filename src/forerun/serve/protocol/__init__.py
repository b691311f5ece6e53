"""This package has the request bodies of each API as pydantic models, and error envelopes."""
