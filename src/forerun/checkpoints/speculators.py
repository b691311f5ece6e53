"""The format of vllm-project/speculators: the layers in a nested ``transformer_layer_config``, the rest at the top.

``vllm serve DIRECTORY`` starts target and head from it; SGLang and TensorRT-LLM do not read it. Layer ids are
boundaries.
"""

from __future__ import annotations

from typing import Any

from forerun.checkpoints import eagle
from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.checkpoints.keys import SPECULATORS, Keys, unknown_keys
from forerun.errors import CheckpointError

LAYERS, WHOLE, KIND = "transformer_layer_config", "speculators_config", "speculators_model_type"
PROPOSALS = "proposal_methods"
DEFAULT_TOKENS = 5  # Drafted tokens per step that are written where the file it came from did not say
AT_THE_TOP = ("speculators_version", "embed_requires_grad", "transformers_version", "auto_map")
"""Keys without meaning for drafting that belong beside, not inside, the nested configuration."""
RESIDUAL_NOTE = (
    "norm_before_residual is not in the file: speculators means false by that, but vLLM would assume true. Written as "
    "false."
)


class SpeculatorsFormat(Format):
    """EAGLE-3 heads of Red Hat and of everybody who trains with speculators."""

    name = "speculators"
    mark = "eagle"

    def recognises(self, config: Config) -> bool:
        return KIND in config

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        kind = keys.text(KIND, "eagle3")
        if kind != "eagle3":
            raise CheckpointError(f"{KIND} is {kind!r}; of this format eagle3 is supported")
        layers, whole = keys.nested(LAYERS), keys.nested(WHOLE)
        fields, found = eagle.read_layers(layers), eagle.to_canonical(tensors)
        for stated in ("architectures", "torch_dtype", "dtype", "tie_word_embeddings"):
            keys.get(stated), layers.get(stated)  # said again when written
        notes = {
            RESIDUAL_NOTE: keys.get("norm_before_residual") is None,
            eagle.WINDOW_NOTE: fields["sliding_window"] is not None and layers.get("layer_types") is None,
        }
        return eagle.make_head(
            found,
            notes,
            **fields,
            target_hidden_size=keys.integer("target_hidden_size", fields["hidden_size"]),
            draft_vocab_size=keys.integer("draft_vocab_size", fields["vocab_size"]),
            boundaries=eagle.agreed(
                keys.integers(eagle.IDS), None, count=layers.get("num_aux_hidden_states"), num_layers=num_layers
            ),
            fc_bias="fc.bias" in found,
            qk_norm=layers.get("model_type") == "qwen3",
            **{flag: keys.flag(flag) for flag in eagle.FLAGS},
            extra=_extra(layers, keys, whole),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        """See `Format.write`; the target is named, because vLLM starts it from here."""
        config = checkpoint.config
        if config.generation != 3:
            raise CheckpointError("engines read only EAGLE-3 heads of this format; use flat for EAGLE-1 and EAGLE-2")
        if config.norm_before_fc and config.fc_norm:
            raise CheckpointError("speculators forbids norm_before_fc together with fc_norm; use flat")
        eagle.to_outputs(config.boundaries)  # refuses what has no id
        extra = {name: value for name, value in config.extra.items() if name != SPECULATORS}
        top = {name: extra.pop(name) for name in AT_THE_TOP if name in extra}
        stated = config.extra.get(SPECULATORS, {})
        proposals = stated.get(PROPOSALS) or [_greedy(DEFAULT_TOKENS)]
        layers = {**extra, **eagle.write_layers(config)}
        if len(config.boundaries) != 3:
            layers["num_aux_hidden_states"] = len(config.boundaries)  # vLLM assumes 3 and looks for it here
        return {
            **top,
            KIND: "eagle3",
            "architectures": ["Eagle3Speculator"],
            "torch_dtype": str(checkpoint.tensors["fc.weight"].dtype).removeprefix("torch."),
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            **{flag: getattr(config, flag) for flag in eagle.FLAGS},
            eagle.IDS: list(config.boundaries),
            "tie_word_embeddings": False,
            LAYERS: layers,
            WHOLE: {
                **stated,
                "algorithm": "eagle3",
                PROPOSALS: proposals,
                "default_proposal_method": proposals[0]["proposal_type"],
                "verifier": {"name_or_path": target.name_or_path, "architectures": list(target.architectures)},
            },
        }, eagle.to_file(checkpoint)


def _greedy(tokens: int) -> dict[str, Any]:
    return {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}


def _extra(layers: Keys, top: Keys, whole: Keys) -> dict[str, Any]:
    """Keys that nobody read; `WHOLE`, by which vLLM knows this format, under another name and only if it says more."""
    for said_again in ("algorithm", "default_proposal_method", "verifier"):
        whole.get(said_again)
    stated, inner, outer = whole.rest(), layers.rest(), top.rest()
    proposals = stated.get(PROPOSALS, [])
    if not isinstance(proposals, list) or any("proposal_type" not in proposal for proposal in proposals):
        raise CheckpointError(f"{PROPOSALS} of {WHOLE} must be objects with a proposal_type, got {proposals!r}")
    if proposals in ([], [_greedy(DEFAULT_TOKENS)]):
        stated.pop(PROPOSALS, None)
    for name in inner.keys() & outer.keys():
        if inner[name] != outer[name] and unknown_keys({name: inner[name]}):
            raise CheckpointError(f"{name} is {outer[name]!r} at the top and {inner[name]!r} in {LAYERS}; remove one")
    return {**inner, **outer} | ({SPECULATORS: stated} if stated else {})
