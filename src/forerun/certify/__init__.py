"""The proof of losslessness as a user's tool, on the user's own model: ``forerun certify``.

Four kinds of evidence: the rules' exact laws by enumeration, greedy text against plain decoding, sampled text against
the target's exact law, and log-probabilities. Uses the public API of the engine and knows nothing of its inside.
"""

from __future__ import annotations

from forerun.certify.reference import Reference
from forerun.certify.report import Check, Plan, Report
from forerun.certify.run import certify

__all__ = ["Check", "Plan", "Reference", "Report", "certify"]
