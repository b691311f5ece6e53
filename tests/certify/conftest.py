"""The engine tests' tiny checkpoints; and the rules are enumerated once, whoever is certified."""

from collections.abc import Iterator
from functools import cache

import pytest

from engine.conftest import checkpoint, draft_checkpoint
from forerun.certify import checks
from forerun.certify.enumeration import RuleCheck, check_rules

__all__ = ["checkpoint", "draft_checkpoint"]


@cache
def enumerated(name: str) -> list[RuleCheck]:
    """Every case of a rule, which depend on nothing else."""
    return list(check_rules([name]))


@pytest.fixture(autouse=True, scope="session")
def rules_enumerated_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "check_rules", lambda names: [case for name in names for case in enumerated(name)])
        yield
