"""Draft heads: small networks that read the target's hidden states. The modules that drafting and training share."""
