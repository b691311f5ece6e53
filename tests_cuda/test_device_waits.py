"""How often a decoding step waits for the device: what the simulated accelerator proves, counted on a real one.

torch names every wait in its debug mode, reads and blocking writes alike; a second run is counted, in which every pass
has been recorded before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from place import DEVICE, DRAFTING

from forerun import LLM
from simulated.arms import ARMS, MOST_READS, PARAMS, PROMPT

pytestmark = pytest.mark.cuda_alone
Sites = list[Counter[str]]


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """The waits while it is open, by line."""
    found = Counter[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        if "synchroniz" in str(one.message):
            found["/".join(one.filename.split("/")[-3:]) + f":{one.lineno}"] += 1


def steps(llm: LLM, prompts: list[str], params: Any, salt: str) -> Sites:
    """Answer the prompts together: the waits of each step that decoded for all of them."""
    ids = [llm.submit(prompt, params, cache_salt=salt) for prompt in prompts]
    counted, begun = Sites(), set[str]()
    while llm.engine.busy:
        together = len(begun) == len(ids) == llm.engine.running
        with waits() as found:
            chunks = llm.engine.step()
        if together:
            counted.append(found)
        begun.update(chunk.request_id for chunk in chunks)
    return counted


def test_a_wait_is_seen() -> None:
    with waits() as found:
        torch.ones(3, device=DEVICE).sum().item()
        torch.ones(3).to(DEVICE)
        torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)
    assert sum(found.values()) == 2 and all("test_device_waits.py" in site for site in found), found


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "auto"])
def test_a_step_waits_once_for_the_verdicts_and_once_for_a_draft_that_a_model_made(arm: str) -> None:
    most, failed = MOST_READS.get(arm, 2), list[str]()
    for rows in (1, 3):
        llm = LLM(
            "demo",
            device=DEVICE,
            dtype="float32",
            speculative_config=DRAFTING.get(arm),
            max_num_seqs=rows,
            max_model_len=256,
            self_check=False,
        )
        prompts = [f"# file number {row}\n{PROMPT}" for row in range(rows)]
        for setting, params in PARAMS.items():
            steps(llm, prompts, params, "first")
            found = steps(llm, prompts, params, "second")
            sites = sum(found, Counter[str]())
            each = sum(sites.values()) / len(found)
            said = {site: round(count / len(found), 2) for site, count in sites.most_common()}
            line = f"{arm}, {setting}, {rows} rows: {each:.2f} waits a step, at most {most}; {said}"
            print(line)  # noqa: T201
            if each > most or not each:
                failed.append(line)
    assert not failed, "\n".join(failed)
