"""What the copying drafters share: indices over text, and how far a copied token may be trusted.

Knows tokens and counts of tokens. Knows no model, no distribution and no rule.
"""
