"""How much to draft, with whom, or not at all: `policy` decides, `explore` tries again, `settings`
holds the constants.

What a pass and a draft cost is found out in `forerun.engine.costs`.
"""
