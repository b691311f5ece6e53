"""P-EAGLE: what its objective computes is what it drafts; its loss, its conditional drop, and that training helps."""

from typing import Any

import pytest
import torch

from forerun.heads.peagle import PEagleConfig, PEagleHead, PEagleObjective, PEagleSettings
from forerun.heads.runner import BlockRunner
from forerun.losses.objective import FeatureBatch, FrozenTarget, Masked
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from training.ttt import (
    HIDDEN,
    VOCABULARY,
    agrees_with_what_is_written_out,
    all_learn,
    batch_of,
    below_twins,
    features,
    model,
    peagle,
    reads,
    taught,
    tokens,
    trained_logits,
    two_texts,
)

WHOLE = {"draft_vocab_size": VOCABULARY}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "fc_norm": True, "own_embedding": False},
    {"sliding_window": 4, "full_layers": (1,), "norm_before_fc": True},
    {"sliding_window": 3, "num_hidden_layers": 1},
    {"own_lm_head": False, **WHOLE, "qk_norm": True},
    {"use_aux_hidden_state": False, "boundaries": (LAST_HIDDEN,)},
]


def objective(made: PEagleHead, **settings: Any) -> PEagleObjective:
    return PEagleObjective(made, FrozenTarget.of(model()), PEagleSettings(**settings))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_depth_equals_drafting(options: dict[str, Any], checkpointed: bool) -> None:
    """Of the second of two documents, behind every entry; the first must not be seen."""
    made, first, text = peagle(**options), tokens(6, seed=9), tokens(14)
    batch = batch_of([first, text], made.config.boundaries, padding=2)
    masked, output = objective(made, depths=4, keep=1.0, gradient_checkpointing=checkpointed).masked(batch)
    logits = trained_logits(made, output)[0].detach()
    runner = BlockRunner(made, TransformersTarget(model(), rows=1, slots=64), rows=2, slots=64, max_run_nodes=6)
    seen, compared = features(text, made.config.boundaries), 0
    for entry in range(len(text) - 1):
        reads(runner, 1, text, entry + 1, seen)
        for depth, own in enumerate(runner.unroll([1], 6, below_twins(runner, 4), levels=4)):
            here = (masked.entries[0] == len(first) + entry) & (masked.depths == depth)
            if depth > 0 and entry >= len(text) - 3:
                assert not bool((here & masked.counted[0]).any())  # it would predict what stands behind the text
                continue
            torch.testing.assert_close(own.detach(), logits[here][0], atol=2e-5, rtol=1e-4)
            compared += 1
    assert compared == (len(text) - 1) + 3 * (len(text) - 3)


@pytest.mark.parametrize("few", [False, True], ids=["all", "dropped"])
def test_the_loss_equals_a_written_out_reference(few: bool) -> None:
    made = peagle(**WHOLE)
    batch = two_texts(made.config.boundaries, start=5)
    of = objective(made, depths=3, keep=0.5 if few else 1.0)
    (masked, output), report = of.masked(batch), of(batch)
    logits, kept = trained_logits(made, output)[0], [kept_by(masked, depth) for depth in range(3)]
    assert few or kept[0] == {*range(3, 10), *range(12, 19)}, "all that count in their document"

    def own(entry: int, depth: int) -> torch.Tensor:
        return logits[(masked.entries[0] == entry) & (masked.depths == depth)][0]

    agrees_with_what_is_written_out(report, batch, 3, own, taught(batch), kept=kept)
    assert all_learn(report, made)


def kept_by(masked: Masked, depth: int) -> set[int]:
    return set(masked.entries[0][(masked.depths == depth) & masked.counted[0]].tolist())


def test_deeper_depths_are_of_fewer_entries_of_those_above() -> None:
    made = peagle()
    batch = batch_of([tokens(42)], made.config.boundaries)  # 39 entries have a second prediction that counts
    of = objective(made, depths=5, keep=0.5, floor=0.2)
    made.train()
    torch.manual_seed(0)
    drops = set()
    for _ in range(6):
        masked, _ = of.masked(batch)
        sizes = [int((masked.depths == depth).sum()) for depth in range(5)]
        assert sizes == [42, 20, 10, 8, 8]  # all, then ceil(39 x 0.5, 0.25, 0.2, 0.2)
        for depth in range(2, 5):
            chosen = [set(masked.entries[0][masked.depths == at].tolist()) for at in (depth - 1, depth)]
            assert chosen[1] <= chosen[0]
        assert kept_by(masked, 0) == set(range(40))
        drops.add(tuple(sorted(kept_by(masked, 1))))
    assert len(drops) == 6
    made.eval()
    still = [kept_by(of.masked(batch)[0], 2) for _ in range(2)]
    assert still[0] == still[1] and max(still[0]) - min(still[0]) > 20


def test_rows_of_unlike_lengths_keep_their_own_share() -> None:
    made = peagle()
    long, short = (batch_of([tokens(size, seed=size)], made.config.boundaries, 20 - size) for size in (20, 8))
    fields = ("tokens", "loss_mask", "documents", "positions")
    joined = {name: torch.cat([getattr(part.batch, name) for part in (long, short)]) for name in fields}
    states = {key: torch.cat([long.features[key], short.features[key]]) for key in long.features}
    both = FeatureBatch(batch=type(long.batch)(**joined), features=states)
    of = objective(made, depths=3, keep=0.5)
    together, apart = of(both), [of(one) for one in (long, short)]
    assert int(together.weight) == sum(int(one.weight) for one in apart)
    torch.testing.assert_close(together.loss, apart[0].loss + apart[1].loss, atol=1e-3, rtol=1e-5)
    for name, (total, count) in together.metrics.items():
        torch.testing.assert_close(total, sum(one.metrics[name][0] for one in apart), atol=1e-4, rtol=1e-4)
        assert int(count) == sum(int(one.metrics[name][1]) for one in apart)


def test_nothing_that_counts_still_reaches_every_parameter() -> None:
    made = peagle()
    batch = batch_of([tokens(6)], made.config.boundaries)
    batch.batch.loss_mask[:] = False
    report = objective(made)(batch)
    assert float(report.weight) == 0
    report.loss.backward()
    assert all(weight.grad is not None for weight in made.parameters())


def test_what_follows_from_the_target() -> None:
    config = PEagleConfig.for_target("peagle", model(), options={"num_hidden_layers": 2})
    assert config.mask_token_id == VOCABULARY - 1 and config.own_embedding and config.boundaries == (1, 2, 3)
    made = PEagleHead(config)
    assert made.mask_hidden.shape == (1, 1, 3 * HIDDEN) and made.config.max_depth is None
