"""One step of speculative decoding, and the interface of drafters."""
