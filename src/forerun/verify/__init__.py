"""Verification rules: one file per rule, all behind `Rule`."""

from forerun.verify.base import RULES, Rule, default_rule, rule_named

__all__ = ["RULES", "Rule", "default_rule", "rule_named"]
