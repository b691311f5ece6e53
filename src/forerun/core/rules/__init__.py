"""Verification rules: one file per rule, all derived from `Rule`."""

from forerun.core.rules.base import RULES, Rule, check_fits, check_named, default_rule, rule_named

__all__ = ["RULES", "Rule", "check_fits", "check_named", "default_rule", "rule_named"]
