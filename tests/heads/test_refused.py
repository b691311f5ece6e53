"""Shapes of heads and settings of objectives that make no sense, of every kind: refused by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from forerun.errors import ArgumentError
from forerun.heads.domino import DominoSettings
from forerun.heads.eagle import EagleSettings
from forerun.heads.kangaroo import KangarooConfig
from forerun.heads.medusa import MedusaConfig
from forerun.heads.mtp import MtpSettings
from forerun.heads.peagle import PEagleConfig, PEagleSettings
from forerun.types import LAST_HIDDEN
from training.ttt import VOCABULARY, dflash, head, hydra, medusa, mlp_speculator, model, peagle

adapter = partial(KangarooConfig.for_target, "kangaroo", model())
SHAPES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (head, {"sliding_window": 0}, "at least 1 position"),
    (head, {"full_layers": (0,)}, "a head with a sliding_window"),
    (head, {"sliding_window": 4, "full_layers": (0,)}, "some, not all"),
    (head, {"sliding_window": 4, "num_hidden_layers": 2, "full_layers": (2,)}, "counted from 0"),
    (head, {"sliding_window": 4, "num_hidden_layers": 3, "full_layers": (1, 0)}, "in order"),
    (dflash, {"block_size": 1}, "block_size must be at least 2"),
    (dflash, {"mask_token_id": VOCABULARY}, "mask_token_id must be one of the target's"),
    (dflash, {"boundaries": (LAST_HIDDEN,)}, "boundaries count layers"),
    (dflash, {"draft_vocab_size": 30}, "needs its own lm_head"),
    (dflash, {"markov_rank": 0}, "markov_rank must be at least 1"),
    (dflash, {"markov_rank": 6, "markov_head_type": "lstm"}, "vanilla, gated, rnn"),
    (dflash, {"gru_hidden_dim": 0}, "gru_hidden_dim must be at least 1"),
    (dflash, {"gru_hidden_dim": 6, "pure_draft_prefix_len": 5}, r"pure_draft_prefix_len must be in 0\.\.4, got 5"),
    (dflash, {"selector_rank": 6, "conv_kernel_size": 6}, r"conv_kernel_size must be in 1\.\.5"),
    (dflash, {"selector_rank": 6, "conv_group_size": 5}, "conv_group_size must divide the hidden size 32"),
    (dflash, {"selector_rank": 0}, "selector_rank must be at least 1"),
    (dflash, {"selector_rank": 6, "selector_top_k": 41}, r"selector_top_k must be in 1\.\.40"),
    (peagle, {"mask_token_id": VOCABULARY}, "mask_token_id must be one of the target's"),
    (peagle, {"generation": 1}, "its layers are EAGLE-3's; got generation 1"),
    (peagle, {"own_lm_head": False}, "needs its own lm_head"),
    (partial(PEagleConfig.for_target, "peagle", model()), {"norm_output": True}, "has no option 'norm_output'"),
    (medusa, {"num_heads": 0}, "num_heads must be at least 1"),
    (medusa, {"boundaries": [1]}, "no option 'boundaries'"),
    (hydra, {"num_heads": 0}, "num_heads and num_layers must be at least 1"),
    (hydra, {"num_hidden_layers": 2}, r"num_hidden_layers is 1 \(Hydra\+\+\) or 0"),
    (hydra, {"boundaries": [1]}, "no option 'boundaries'"),
    (hydra, {"hidden_size": 8}, "no option 'hidden_size'"),
    (mlp_speculator, {"n_predict": 0}, "n_predict must be at least 1"),
    (mlp_speculator, {"n_predict": 1, "tie_weights": True}, "n_predict must be at least 2"),
    (mlp_speculator, {"boundaries": [1]}, "no option 'boundaries'"),
    (adapter, {"boundaries": [1, 2]}, "boundaries is the one after the layers that draft"),
    (adapter, {"boundaries": [LAST_HIDDEN]}, "boundaries is the one"),
    (adapter, {"boundaries": [9]}, "boundary 9 does not exist: the target has 4 layers"),
    (adapter, {"num_hidden_layers": 2}, "has no option 'num_hidden_layers'"),
]
SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (EagleSettings, {"noise": -0.1}, "objective: "),
    (EagleSettings, {"regression_weight": 0.0, "token_weight": 0.0}, "objective: "),
    (EagleSettings, {"steps": 0}, "objective: "),
    (DominoSettings, {"base_start": 1.5}, "base_start must be less than or equal to 1"),
    (DominoSettings, {"base_until": 0.0}, "base_until must be greater than 0"),
    (PEagleSettings, {"depths": 0}, "depths"),
    (PEagleSettings, {"keep": 0.0}, "keep"),
    (PEagleSettings, {"floor": 1.5}, "floor"),
    (MtpSettings, {"steps": 0}, "steps must be greater than or equal to 1"),
    (MtpSettings, {"decay": 0}, "decay must be greater than 0"),
]


@pytest.mark.parametrize(("make", "options", "named"), [*SHAPES, *SETTINGS])
def test_what_makes_no_sense_is_refused(make: Callable[..., Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        make(**({"options": options} if isinstance(make, partial) else options))


@pytest.mark.parametrize("config", [MedusaConfig, type(hydra().config), type(mlp_speculator().config), KangarooConfig])
def test_a_head_without_a_vocabulary_of_its_own_is_asked_for_none(config: Any) -> None:
    with pytest.raises(ArgumentError, match=r"leave draft\.vocab_size"):
        config.for_target("any", model(), 20)
