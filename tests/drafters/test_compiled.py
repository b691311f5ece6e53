"""What all compiled code shares: the compiler, what is known of a copied token, what is learned of a draft."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from forerun.core.acceptance import Acceptance, Evidence, Proposal, by_match
from forerun.drafters.lookup import drafts


def test_evidence_and_estimates_are_those_of_every_drafter_that_copies() -> None:
    counts, acceptance, keys = np.zeros((drafts.KEYS, 2)), Acceptance(), dict[int, Any]()
    rng = random.Random(0)
    for place, source in enumerate(drafts.SOURCES):
        for matched in (*range(40), 1000):
            for share in (0.0, 0.05, 0.1, 0.55, 0.999, 1.0):
                known, (key, prior) = by_match(source, matched, share), drafts.evidence(place, matched, share)
                assert keys.setdefault(key, known.key) == known.key and prior == known.prior
                assert drafts.estimate(counts, key, prior) == acceptance.estimate(*known)
                accepted = rng.random() < 0.5
                acceptance.learn(known.key, accepted)
                counts[key] += accepted, 1.0
    assert len(keys) == len(set(keys.values())) and 0 <= min(keys) <= max(keys) < drafts.KEYS


@pytest.mark.parametrize("seed", range(10))
def test_what_is_learned_of_a_draft_is_what_every_drafter_learns(seed: int) -> None:
    rng, acceptance, counts = random.Random(seed), Acceptance(), np.zeros((drafts.KEYS, 2))
    for _ in range(20):
        size = rng.randrange(1, 9)
        nodes = np.zeros((size, drafts.NODE_COLUMNS), np.int32)
        for node in range(1, size):
            nodes[node] = rng.randrange(3), rng.randrange(node), rng.randrange(4)
        tokens, parents, keys = nodes.T.tolist()
        text = [rng.randrange(3) for _ in range(rng.randrange(5))]
        proposal = Proposal(acceptance=acceptance, tokens=tokens, parents=[-1, *parents[1:]])
        proposal.evidence.update({node: Evidence(keys[node], 0.5) for node in range(1, size)})
        proposal.learn(text)
        drafts.learn(nodes, np.array(text, np.int32), counts)
    assert [tuple(counts[key]) for key in range(4)] == [acceptance.counts(key) for key in range(4)]


@pytest.mark.slow
def test_nothing_compiled_looks_beyond_an_array(tmp_path: Path) -> None:
    """The tests of all that is compiled, with numba's checks, which are off in what users run."""
    here = Path(__file__).parent
    names = ("suffix", "follower", "ngram")
    files = [*(str(here / f"test_{name}.py") for name in names), str(here.parent / "deploy/test_sequences.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not linear"]
    checked = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([*command, *files], env=checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_a_folder_that_can_be_written_all_is_compiled_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    @drafts.compiled
    def twice(number: int) -> int:
        return 2 * number

    assert twice(21) == 42 and twice.nopython_signatures


@pytest.mark.parametrize("changed", ["called.py", "../other.py", None])
def test_a_changed_source_makes_its_folder_stale(
    tmp_path: Path, changed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other.py"
    kept = folder / "__pycache__" / "calls.f-1.py311.1.nbc"
    kept.parent.mkdir(parents=True)
    for file in (folder / "calls.py", folder / "called.py", other, kept):
        file.touch()
        os.utime(file, (1000, 1000))
    if changed:
        os.utime(folder / changed, (2000, 2000))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        drafts._forget_stale(folder, other)
        assert kept.exists(), "it belongs to somebody else"
    drafts._forget_stale(folder, other)
    assert kept.exists() == (changed is None)


def refused(path: Path) -> None:
    raise PermissionError(path)
