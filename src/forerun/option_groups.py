"""These parameters put an option into one of the groups in which ``forerun VERB --help`` lists what verbs share.
Imports no torch.
"""

from __future__ import annotations

from cyclopts import Group, Parameter

MODEL, DRAFTING, SAMPLING, CAPACITY, API, ACCESS, NETWORK, LOGS = (
    Parameter(group=Group(name, sort_key=order))
    for order, name in enumerate(("Model", "Drafting", "Sampling", "Capacity", "API", "Access", "Network", "Logs"))
)
"""A group says what loads the target, what drafts, how tokens are chosen, how much runs at once, what requests may say
and get, who may send them, where the server listens, and what it writes. A verb's own options stand before them.
"""
