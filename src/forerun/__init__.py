"""forerun: speculative decoding that makes language models answer faster without changing what they answer."""
