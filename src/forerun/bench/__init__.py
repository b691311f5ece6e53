"""forerun bench measures any OpenAI-compatible server under load and reads each engine's
speculation counters.
"""
