"""Every registered drafter on the device: the text and the drafts of the CPU, and greedily those of plain decoding.

Models are tiny and in float32, whose rounding differs between devices by 1e-6: too little to change a token here.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from place import DEVICE, moved, no_recording_failed

from contract.harness import VARIANTS, Variant
from forerun.drafters import DRAFTERS
from simulated.steps import AUTO, EVERY, OF_HEADS, SETTINGS, SPEED, Answer, answers, kept

pytestmark = pytest.mark.usefixtures("quickly_measured")
FIRST = {str(variant) for name in DRAFTERS for variant in VARIANTS.get(name, [Variant(name)])[:1]}
IN_ALL = FIRST | {str(None), str(SPEED), str(AUTO), "draft_model-tree", "eagle3-dynamic", "eagle3-tree", "medusa-chain"}
"""Of these every setting is run; the other variants are run greedily and with top-p."""


def cases() -> list[Any]:
    """Variants with settings, alike beside each other: a process then has made what they share."""
    return [
        (variant, setting)
        for variant in EVERY
        for setting in SETTINGS
        if setting in ("greedy", "top-p") or str(variant) in IN_ALL
    ]


@cache
def on_the_cpu(variant: Variant | None, setting: str) -> list[Answer]:
    """What is expected on the device."""
    return answers(variant, SETTINGS[setting])


@pytest.mark.parametrize(("variant", "setting"), cases(), ids=str)
def test_the_device_gives_the_text_and_the_drafts_of_the_cpu(
    variant: Variant | None, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    expected = on_the_cpu(variant, setting)
    with no_recording_failed(caplog):
        found = answers(variant, SETTINGS[setting], move=moved, device=DEVICE.partition(":")[0])
    assert [one.token_ids for one in found] == [one.token_ids for one in expected], "the text"
    if setting in ("greedy", "logprobs"):
        plain = on_the_cpu(None, setting) if variant is not SPEED else expected
        assert [one.token_ids for one in found] == [one.token_ids for one in plain], "the text of plain decoding"
    assert not any(one.drafter_errors for one in found)
    assert variant is None or sum(one.drafted for one in found) > 0
    drafts = [[(one.drafted, one.accepted) for one in some] for some in (found, expected)]
    if "dynamic" in str(variant):  # Where two nodes are as likely but for rounding, another one is drafted
        drafts = [[accepted for _, accepted in some] for some in drafts]
    assert drafts[0] == drafts[1], "how much was drafted and accepted"
    assert [one.ranks for one in found] == [one.ranks for one in expected]
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]


@pytest.mark.parametrize("variant", OF_HEADS, ids=str)
def test_what_a_head_keeps_of_a_text_is_what_it_keeps_on_the_cpu(
    variant: Variant, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys and values of what was committed, by recorded passes, and the last features."""
    with no_recording_failed(caplog):
        found = kept(variant, moved)
    for own, other in zip(found, kept(variant, lambda module: module), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
