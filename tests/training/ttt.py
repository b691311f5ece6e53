"""What the tests of training-time test share: a tiny target, random heads for it, and features of a text."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaForCausalLM

from forerun.drafters.kinds import kind_named
from forerun.heads.dflash import DFlashConfig, DFlashHead
from forerun.heads.dflash2 import DFlash2Config
from forerun.heads.domino import DominoConfig
from forerun.heads.dspark import DSparkConfig
from forerun.heads.eagle import EagleConfig, EagleHead
from forerun.heads.hydra import HydraConfig, HydraHead
from forerun.heads.kangaroo import KangarooConfig, KangarooHead
from forerun.heads.layers import DecoderHead
from forerun.heads.medusa import MedusaConfig, MedusaHead
from forerun.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead
from forerun.heads.mtp import MtpConfig, MtpHead
from forerun.heads.peagle import PEagleConfig, PEagleHead
from forerun.heads.runner import BlockRunner
from forerun.losses.objective import FeatureBatch, LossReport, TokenBatch
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from llamas import HEAD_SIZES, tiny_llama

VOCABULARY = 40
HIDDEN = 32
FIRST: dict[str, Any] = {"generation": 1, "boundaries": (LAST_HIDDEN,)}
FIRST |= {"draft_vocab_size": VOCABULARY, "own_lm_head": False}
"""What makes an EAGLE-1 head of `head`."""
LAYERS: dict[str, Any] = {**HEAD_SIZES, "vocab_size": VOCABULARY, "initializer_range": 0.2}
"""Of the heads below, which are for `model()`; their options say otherwise."""

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    **{name: LAYERS[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
}
"""Keys of a target whose own class of layer an MTP module has."""
INDEXED: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    **{name: LAYERS[name] for name in ("hidden_size", "num_attention_heads")},
    **{"num_key_value_heads": LAYERS["num_attention_heads"], "qk_rope_head_dim": LAYERS["head_dim"]},
    **{"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_shared_experts": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "index_head_dim": 16},
}
"""The same, with an index."""


@functools.cache
def model() -> LlamaForCausalLM:
    """A random Llama of four layers in float32; the generator that heads are drawn from stays as it was."""
    with torch.random.fork_rng():
        return tiny_llama(VOCABULARY, num_hidden_layers=4, max_position_embeddings=128, initializer_range=0.2)


def _random(head: Callable[[Any], Any], config: Any) -> Any:
    """A head of random weights: no norm is all ones, no correction nothing, no reduced vocabulary the first tokens."""
    torch.manual_seed(1)
    made = head(config).eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        if name.startswith(("markov_head", "confidence_head", "embed_proj", "candidate_selector")) or "_conv." in name:
            torch.nn.init.normal_(weight, std=0.3)
    if config.reduced_vocabulary:
        ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))[: config.draft_vocab_size]
        made.set_vocabulary(ids.sort().values)
    return made


def head(**options: Any) -> EagleHead:
    """EAGLE-3's unless the options say otherwise, with a reduced vocabulary."""
    return _random(EagleHead, EagleConfig(**{**LAYERS, "draft_vocab_size": 30, "boundaries": (1, 2, 3), **options}))


def medusa(**options: Any) -> MedusaHead:
    """Of three depths."""
    torch.manual_seed(1)
    made = MedusaHead(MedusaConfig.for_target("medusa", model(), options={"num_heads": 3, **options})).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return made


def hydra(**options: Any) -> HydraHead:
    """Of three depths of three blocks."""
    given = {"num_heads": 3, "num_layers": 3, "initializer_range": 0.2, **options}
    made = _random(HydraHead, HydraConfig.for_target("hydra", model(), options=given))
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    return made


def mlp_speculator(**options: Any) -> MlpSpeculatorHead:
    """Of three depths, narrower than the target."""
    torch.manual_seed(1)
    given = {"n_predict": 3, "inner_dim": 24, **options}
    made = MlpSpeculatorHead(MlpSpeculatorConfig.for_target("mlp_speculator", model(), options=given)).eval()
    for norm in made.ln:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        torch.nn.init.normal_(norm.bias, std=0.3)
    return made


def kangaroo(**options: Any) -> KangarooHead:
    """After two layers."""
    given = {"boundaries": [2], "initializer_range": 0.2, **options}
    return _random(KangarooHead, KangarooConfig.for_target("kangaroo", model(), options=given))


TWO_LAYERS: dict[str, Any] = {**LAYERS, "boundaries": (1, 2, 3)}
TWO_LAYERS |= {"num_hidden_layers": 2, "mask_token_id": VOCABULARY - 1}


def dflash(**options: Any) -> DFlashHead:
    """Of two layers and blocks of five; with a ``markov_rank`` a DSpark head, with a ``gru_hidden_dim`` a Domino, with
    a ``selector_rank`` a DFlash 2 head."""
    config: Any = DFlashConfig
    if "markov_rank" in options:
        config = DSparkConfig
    elif "gru_hidden_dim" in options:
        config, options = DominoConfig, {"emb_dim": 7, **options}
    elif "selector_rank" in options:
        config, options = DFlash2Config, {"conv_group_size": 8, "selector_top_k": 6, **options}
    shape = config(**{**TWO_LAYERS, "draft_vocab_size": VOCABULARY, "block_size": 5, **options})
    return _random(kind_named(shape.kind).head, shape)


def peagle(**options: Any) -> PEagleHead:
    """Of two layers."""
    return _random(PEagleHead, PEagleConfig(**{**TWO_LAYERS, "draft_vocab_size": 30, **options}))


def mtp(**options: Any) -> MtpHead:
    """One layer, dense and on the target's last hidden state."""
    given = {**LAYERS, "draft_vocab_size": VOCABULARY, "boundaries": (LAST_HIDDEN,), **options}
    return _random(MtpHead, MtpConfig(**given))


def tokens(length: int, seed: int = 3) -> list[int]:
    """A random text."""
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def features(text: list[int], boundaries: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """boundary -> (1, S, H), and `LAST_HIDDEN`, by the engine's own target."""
    target = TransformersTarget(model(), rows=1, slots=len(text) + 1)
    scored = target.prefill([0], [text], boundaries={*boundaries, LAST_HIDDEN})
    return {boundary: states.clone() for boundary, states in scored.hidden_states.items()}


@torch.no_grad()
def drafted_block(made: Any, text: list[int], root: int) -> list[Any]:
    """What a head whose depths depend on the tokens above drafts behind the root, the text's own tokens beside others:
    of every depth the logits below another token and below the text's, and the acceptance there."""
    runner = BlockRunner(made, TransformersTarget(model(), rows=1, slots=64), rows=1, slots=64)
    states = {boundary: state[:, :root] for boundary, state in features(text, made.config.boundaries).items()}
    runner.ingest([0], [text[1 : root + 1]], states)
    depths = made.config.max_depth or 0
    drafts = [7, *text[root + 1 :], *[0] * depths]

    def levels(logits: torch.Tensor) -> list[Any]:
        found, place = [], 0
        for depth in range(depths):
            if depth:  # The path's token stands second; its parent's place is 0 under the root
                pair, above = torch.tensor([[drafts[0], drafts[depth]]]), torch.full((1, 2), place)
                logits, place = runner.descend(pair, above), 1
            sure = None if runner.acceptance is None else runner.acceptance[0, place]
            found.append((logits[0, 0], logits[0, place], sure))
        return found

    return runner.unroll([0], 6, levels)


def reads(runner: Any, row: int, text: list[int], entries: int, seen: dict[int, torch.Tensor]) -> None:
    """The row, begun anew, reads so many entries of a text: one as its prompt, then what was committed."""
    runner.truncate(row, 0)
    for start, stop in ((0, 1), (1, entries)):
        if stop > start:
            states = {boundary: state[:, start:stop] for boundary, state in seen.items()}
            runner.ingest([row], [text[start + 1 : stop + 1]], states)


def below_twins(runner: Any, depths: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Grows a draft of two paths; the logits at each depth, which do not depend on the tokens above."""

    def levels(logits: torch.Tensor) -> list[torch.Tensor]:
        found, twins = [logits[0, 0]], torch.tensor([[4, 5]])
        return found + [runner.descend(twins, torch.zeros_like(twins))[0, 0] for _ in range(1, depths)]

    return levels


def agrees_with_what_is_written_out(
    report: LossReport,
    batch: FeatureBatch,
    depths: int,
    own: Callable[[int, int], torch.Tensor],
    wanted: Callable[[int], torch.Tensor],
    *,
    share: Callable[[int], float] = lambda depth: 1.0,
    kept: list[set[int]] | None = None,
) -> None:
    """A loss prediction by prediction: behind an entry, depth d is about the token d + 2 further, where that counts and
    is of the entry's document. Acceptance is of chains whose every depth counts.

    Args:
        own: entry and depth -> what is predicted, (V,) logits.
        wanted: place of a token -> its distribution, (V,).
        kept: by depth the entries that were drawn, where not all are.
    """
    total, weight, right, chains = torch.zeros(()), 0.0, [0] * depths, [0] * depths
    documents, mask = batch.batch.documents[0].tolist(), batch.batch.loss_mask[0].tolist()
    for entry, document in enumerate(documents):
        drafted = agreed = True
        for depth in range(depths):
            place = entry + 2 + depth
            counts = place < len(documents) and documents[place] == document and mask[place]
            counts = counts and (kept is None or entry in kept[depth])
            drafted = drafted and counts
            if counts:
                logits, target = own(entry, depth).detach(), wanted(place)
                total -= share(depth) * (target * logits.log_softmax(-1)).sum()
                weight += share(depth)
                agreed = agreed and int(logits.argmax()) == int(target.argmax())
            right[depth] += drafted and agreed
            chains[depth] += drafted
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-3, rtol=1e-5)
    assert abs(float(report.weight) - weight) < 1e-3 * weight
    for part, expected in enumerate((right, chains)):
        assert [int(report.metrics[f"acceptance_{depth}"][part]) for depth in range(depths)] == expected


@torch.no_grad()
def taught(batch: FeatureBatch) -> Callable[[int], torch.Tensor]:
    """Place of a token -> the target's distribution there."""
    probs = model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]).softmax(-1)
    return lambda place: probs[place - 1]


def one_hot(batch: FeatureBatch) -> Callable[[int], torch.Tensor]:
    """Place of a token -> all of the distribution on the token itself."""
    return lambda place: torch.nn.functional.one_hot(batch.batch.tokens[0, place], VOCABULARY).float()


def all_learn(report: LossReport, module: torch.nn.Module) -> bool:
    """Whether every parameter gets a gradient from the loss."""
    report.loss.backward()
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    return all(weight.grad is not None and bool(weight.grad.abs().sum() > 0) for weight in trained)


def trained_logits(made: DecoderHead, output: torch.Tensor) -> torch.Tensor:
    """Those of the head's own output, or of the target's."""
    own = made.logits(output)
    return model().get_output_embeddings()(output) if own is None else own


def two_texts(boundaries: tuple[int, ...], start: int = 4) -> FeatureBatch:
    """Two documents and padding; of the first what stands from `start` on counts."""
    batch = batch_of([tokens(12), tokens(9, seed=5)], boundaries, padding=3)
    batch.batch.loss_mask[0, :start] = False
    return batch


def batch_of(documents: list[list[int]], boundaries: tuple[int, ...], padding: int = 0) -> FeatureBatch:
    """One packed row; every token counts."""
    parts, none = [features(document, boundaries) for document in documents], torch.zeros(1, padding, HIDDEN)
    flat = [token for document in documents for token in document] + [0] * padding
    numbers = [number for number, document in enumerate(documents) for _ in document] + [-1] * padding
    positions = [place for document in documents for place in range(len(document))] + [0] * padding
    ids, mask, own, places = (
        torch.tensor([row]) for row in (flat, [number >= 0 for number in numbers], numbers, positions)
    )
    return FeatureBatch(
        batch=TokenBatch(tokens=ids, loss_mask=mask, documents=own, positions=places),
        features={boundary: torch.cat([*(part[boundary] for part in parts), none], dim=1) for boundary in parts[0]},
    )
