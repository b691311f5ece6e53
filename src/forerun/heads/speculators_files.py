"""The format of vllm-project/speculators: the layers in a nested ``transformer_layer_config``, the rest at the top.

``vllm serve DIRECTORY`` starts target and head from it; SGLang and TensorRT-LLM do not read it. Layer ids are
boundaries.
"""

from __future__ import annotations

from typing import Any

from forerun.drafters.kinds import kind_named
from forerun.errors import CheckpointError, refuse
from forerun.heads import block_files, decoders, peagle
from forerun.heads.dflash import DFlashConfig
from forerun.heads.dspark import DSparkConfig
from forerun.heads.eagle import EagleConfig
from forerun.heads.files import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.heads.keys import KIND, LAYERS, NON_CAUSAL, SPECULATORS, WHOLE, Keys, unknown_keys
from forerun.heads.layers import DecoderConfig
from forerun.heads.peagle import PEagleConfig

PROPOSALS, BLOCK_IDS = "proposal_methods", "aux_hidden_state_layer_ids"
OWN = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}  # Kinds of this format, and their architectures
FUSED = ("eagle3", "peagle")  # Kinds whose layers are EAGLE-3's
DEFAULT_TOKENS = 5  # Drafted tokens per step that are written where the file it came from did not say
AT_THE_TOP = ("speculators_version", "embed_requires_grad", "transformers_version", "auto_map")
"""Keys without meaning for drafting that belong beside, not inside, the nested configuration."""
RESIDUAL_NOTE = (
    "norm_before_residual is not in the file: speculators means false by that, but vLLM would assume true. Written as "
    "false."
)


class SpeculatorsFormat(Format):
    """Heads of Red Hat and of others who train with speculators."""

    name = "speculators"

    def recognises(self, config: Config) -> bool:
        return KIND in config

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        kind = keys.text(KIND, "eagle3")
        if kind not in OWN:
            raise CheckpointError(f"{KIND} is {kind!r}; of this format {', '.join(OWN)} are supported")
        layers, whole = keys.nested(LAYERS), keys.nested(WHOLE)
        fields, canonical = decoders.read_layers(layers), decoders.to_canonical(tensors)
        for one in (keys, layers):
            one.pass_over("architectures", "torch_dtype", "dtype", "tie_word_embeddings")
        fused = kind in FUSED
        windows = fields["sliding_window"] is not None
        config_class, fields_of_kind, notes = (
            _eagle3(keys, layers, num_layers) if fused else _dflash(keys, kind, windows)
        )
        if kind == "peagle":
            config_class = PEagleConfig
            fields_of_kind = fields_of_kind | {"mask_token_id": keys.integer("mask_token_id")}
            canonical = peagle.with_mask(canonical)
        return decoders.make_head(
            config_class,
            canonical,
            notes,
            **fields,
            **fields_of_kind,
            target_hidden_size=keys.integer("target_hidden_size", fields["hidden_size"]),
            draft_vocab_size=keys.integer("draft_vocab_size", fields["vocab_size"]),
            **({"fc_bias": "fc.bias" in canonical} if fused else {}),
            qk_norm=layers.get("model_type") == "qwen3",
            extra=_extra(layers, keys, whole, _usual_tokens(fields_of_kind)),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        """Write the files, see `Format.write`; the target is named, because vLLM starts it from
        here.
        """
        config = checkpoint.config
        refuse(
            (
                isinstance(config, DFlashConfig) and config.kind not in OWN,
                f"no {kind_named(config.kind).title} heads are written in speculators' format; use dflash",
            ),
            (
                config.kind not in OWN,
                "engines read only EAGLE-3 heads of this format; use flat for EAGLE-1 and EAGLE-2",
            ),
            error=CheckpointError,
        )
        decoders.to_outputs(config.boundaries)  # refuses what has no id
        refuse(
            (getattr(config, "latent", None) is not None, "vLLM reads no latent attention in this format; use flat"),
            (
                not getattr(config, "next_layer_regular", True),
                "in this format the first layer alone reads the embedding; use flat",
            ),
            error=CheckpointError,
        )
        extra = {name: value for name, value in config.extra.items() if name != SPECULATORS}
        top = {name: extra.pop(name) for name in AT_THE_TOP if name in extra}
        stated = config.extra.get(SPECULATORS, {})
        proposals = stated.get(PROPOSALS) or [_greedy(config.max_depth or DEFAULT_TOKENS)]
        layers = {**extra, **decoders.write_layers(config)}
        fused = config.kind in FUSED
        if fused and len(config.boundaries) != 3:
            layers["num_aux_hidden_states"] = len(config.boundaries)  # vLLM assumes 3 and looks for it here
        return {
            **top,
            KIND: config.kind,
            "architectures": [OWN[config.kind]],
            "torch_dtype": decoders.dtype_name(checkpoint),
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            **(_of_eagle3(config) if fused else _of_dflash(config)),
            "tie_word_embeddings": False,
            LAYERS: layers,
            WHOLE: {
                **stated,
                "algorithm": config.kind,
                PROPOSALS: proposals,
                "default_proposal_method": proposals[0]["proposal_type"],
                "verifier": {"name_or_path": target.name_or_path, "architectures": list(target.architectures)},
            },
        }, decoders.to_file(checkpoint)


Own = tuple[type[DecoderConfig], dict[str, Any], dict[str, bool]]
"""A kind's configuration class, the fields that only this kind has, and notes with whether they
apply.
"""


def _eagle3(keys: Keys, layers: Keys, num_layers: int | None) -> Own:
    """Return what EAGLE-3 adds to the layers."""
    count = layers.get("num_aux_hidden_states")
    ids = decoders.LayerIds(decoders.IDS, keys.integers(decoders.IDS), outputs=False)
    fields = {
        "boundaries": decoders.agree_boundaries(ids, count=count, num_layers=num_layers),
        **{flag: keys.flag(flag) for flag in decoders.FLAGS},
    }
    return EagleConfig, fields, {RESIDUAL_NOTE: keys.get("norm_before_residual") is None}


def _of_eagle3(config: EagleConfig) -> dict[str, Any]:
    refuse(
        (
            config.norm_before_fc and config.fc_norm,
            "speculators forbids norm_before_fc together with fc_norm; use flat",
        ),
        (
            config.kind == "peagle" and config.fc_norm,
            "vLLM does not read fc_norm of a P-EAGLE head in this format; use peagle",
        ),
        error=CheckpointError,
    )
    mask = {"mask_token_id": config.mask_token_id} if isinstance(config, PEagleConfig) else {}
    return {**{flag: getattr(config, flag) for flag in decoders.FLAGS}, decoders.IDS: list(config.boundaries), **mask}


def _dflash(keys: Keys, kind: str, windows: bool) -> Own:
    """Return what DFlash and DSpark add to the layers, of which some have `windows`. Layer ids are
    required, and are boundaries.
    """
    boundaries = keys.integers(BLOCK_IDS)
    if boundaries is None:
        raise CheckpointError(f"config.json has no {BLOCK_IDS}; the configuration of a {kind} head needs it")
    fields = {
        "boundaries": boundaries,
        "block_size": keys.integer("block_size", 8),
        "mask_token_id": keys.integer("mask_token_id"),
        "sample_from_anchor": keys.flag("sample_from_anchor", kind == "dspark"),
        "causal_windows": not keys.flag(NON_CAUSAL) and windows,
    }
    return (
        (DSparkConfig, fields | block_files.read_markov(keys), {}) if kind == "dspark" else (DFlashConfig, fields, {})
    )


def _of_dflash(config: DFlashConfig) -> dict[str, Any]:
    refuse(
        (
            config.is_causal and not (config.sliding_window and not config.full_layers),
            "speculators has no key for blocks that are causal in layers without a window; use dflash",
        ),
        (
            config.causal_windows and config.full_layers,
            f"vLLM takes {NON_CAUSAL} here for all layers, with a window or not; use dflash",
        ),
        error=CheckpointError,
    )
    return {
        BLOCK_IDS: list(config.boundaries),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        NON_CAUSAL: not (config.causal_windows or config.is_causal),
        **(block_files.write_markov(config) if isinstance(config, DSparkConfig) else {}),
    }


def _usual_tokens(own: dict[str, Any]) -> int:
    """Return the drafted tokens per step of a head with these fields, where a file says nothing
    else.
    """
    if "block_size" not in own:
        return DEFAULT_TOKENS
    return int(own["block_size"]) if own["sample_from_anchor"] else int(own["block_size"]) - 1


def _greedy(tokens: int) -> dict[str, Any]:
    return {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}


def _extra(layers: Keys, top: Keys, whole: Keys, usual: int) -> dict[str, Any]:
    """Return the keys that nobody read. `WHOLE`, by which vLLM knows this format, is kept under
    another name and only if it says more.
    """
    whole.pass_over("algorithm", "default_proposal_method", "verifier")
    stated, inner, outer = whole.rest(), layers.rest(), top.rest()
    proposals = stated.get(PROPOSALS, [])
    if not isinstance(proposals, list) or any("proposal_type" not in proposal for proposal in proposals):
        raise CheckpointError(f"{PROPOSALS} of {WHOLE} must be objects with a proposal_type, got {proposals!r}")
    if proposals in ([], [_greedy(usual)]):
        stated.pop(PROPOSALS, None)
    for name in inner.keys() & outer.keys():
        if inner[name] != outer[name] and unknown_keys({name: inner[name]}):
            raise CheckpointError(f"{name} is {outer[name]!r} at the top and {inner[name]!r} in {LAYERS}; remove one")
    return {**inner, **outer} | ({SPECULATORS: stated} if stated else {})
