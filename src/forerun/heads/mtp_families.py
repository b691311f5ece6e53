"""The layouts of MTP layers in the checkpoints of targets: a family of models is one entry of `FAMILIES`.

Layouts as vLLM's ``deepseek_mtp.py``, ``glm4_moe_mtp.py`` and ``mimo_mtp.py`` load them. DeepSeek-V3 and GLM-4-MoE:
``model.layers.{L + k}.*`` behind the target's L layers, ``eh_proj`` of [embedding; state], on the target's state after
the final norm. MiMo: ``model.mtp_layers.{k}.*``, ``input_proj`` of [state; embedding], on the state before the norm.
Qwen3-Next and Qwen3.5 (``qwen3_next_mtp.py``, ``qwen3_5_mtp.py``):
``mtp.layers.0.*`` and, beside it, ``mtp.fc`` of [embedding; state], norms and ``mtp.norm``; after the final norm.
Nemotron 3 (``nemotron_h_mtp.py``): ``mtp.layers.0.*`` attends, ``mtp.layers.1.*`` are its experts, one module.
DeepSeek-V3.2 and GLM-5 as DeepSeek-V3, with an index; Ling 3 (``bailing_moe_v3_mtp.py``) with other names. MiMo-V2
(``mimo_v2_mtp.py``): ``model.mtp.layers.{k}.*``. Step (``step3p5_mtp.py``): on the state before the norm, with output
heads of their own. Mellum (transformers' ``MtpModel``) and Exaone (``exaone_moe_mtp.py``) as Qwen3-Next. GLM-4.7-Flash,
GLM-OCR and Hunyuan V3 (``glm4_moe_lite_mtp.py``, ``glm_ocr_mtp.py``, ``hy_v3_mtp.py``) as DeepSeek-V3, the last with
other names. Ernie 4.5 (``ernie_mtp.py``): ``model.mtp_block.0.*`` and three parts beside it; FastDeploy's
``ernie4_5_mtp.py`` norms with the target's last norm, which vLLM and SGLang leave out.
What a module hands on is normed where what it reads is (vLLM 47448, SGLang's ``deepseek_nextn.py``, exllamav3 238).
Otherwise embedding and output head are the target's; copies in some checkpoints (``shared_head.head``) no engine reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAST_NORM, TARGET_NORM = "shared_head.norm", "model.norm"
"""The norm after a module's layers, and the target's, which some modules share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one family of models stores its MTP layers."""

    model_type: str
    layers: str = "model.layers."  # Before a layer's number
    behind: bool = True  # The numbers go on from those of the target's layers
    final_norm: bool = True  # The state that is read has been through the target's final norm
    names: Mapping[str, str] = field(default_factory=dict)  # Parts, ours -> theirs, where they differ
    state_first: bool = False  # The projection reads [state; embedding]
    classes: bool = False  # Layers are of the target's classes in transformers
    announced: bool = True  # The configuration says how many modules there are
    outside: Mapping[str, str] = field(default_factory=dict)
    """Parts that stand elsewhere than `layers` and a number say, ours -> their whole names; ``{last}`` is the number of
    the last layer.
    """
    single: bool = False  # All layers make a single module
    as_first: bool = False  # The module attends as the target's first layer does, which has a window
    pairs: bool = False  # The target's layers take the angle of each pair of dimensions twice in a row


QWEN: dict[str, Any] = {
    "layers": "mtp.layers.",
    "behind": False,
    "classes": True,
    "announced": False,
    "outside": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
    },
    "single": True,
}
"""How Qwen3-Next and its successors store them."""
FAMILIES: dict[str, Family] = {
    "DeepseekV3ForCausalLM": Family(model_type="deepseek_v3"),
    "DeepseekV32ForCausalLM": Family(model_type="deepseek_v32", classes=True),
    "GlmMoeDsaForCausalLM": Family(model_type="glm_moe_dsa", classes=True),
    "Glm4MoeForCausalLM": Family(model_type="glm4_moe"),
    "MiMoForCausalLM": Family(
        model_type="mimo",
        layers="model.mtp_layers.",
        behind=False,
        final_norm=False,
        names={
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "shared_head.norm": "final_layernorm",
        },
        state_first=True,
    ),
    "MiMoV2FlashForCausalLM": Family(
        model_type="mimo_v2_flash",
        layers="model.mtp.layers.",
        behind=False,
        classes=True,
        announced=False,
        names={
            "shared_head.norm": "final_layernorm",
            "post_attention_layernorm": "pre_mlp_layernorm",
            "self_attn.sinks": "self_attn.attention_sink_bias",
        },
    ),
    **dict.fromkeys(
        ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),
        Family(
            model_type="bailing_hybrid",
            classes=True,
            names={
                "shared_head.norm": "final_layernorm",
                "self_attn.o_proj": "attention.dense",
                "self_attn": "attention",
                "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
            },
        ),
    ),
    **dict.fromkeys(
        ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
        Family(
            model_type="step3p5",
            final_norm=False,
            classes=True,
            names={
                "shared_head.norm": "transformer.shared_head.norm",
                "output_head": "transformer.shared_head.output",
            },
        ),
    ),
    "MellumForCausalLM": Family(model_type="mellum", **{**QWEN, "announced": True}),
    "Qwen3NextForCausalLM": Family(model_type="qwen3_next", **QWEN),
    **dict.fromkeys(
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), Family(model_type="qwen3_5_text", **QWEN)
    ),
    **dict.fromkeys(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), Family(model_type="qwen3_5_moe_text", **QWEN)
    ),
    "NemotronHForCausalLM": Family(
        model_type="nemotron_h",
        layers="mtp.layers.",
        behind=False,
        classes=True,
        outside={
            **{name: f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")},
            "shared_head.norm": "mtp.layers.{last}.final_layernorm",
        },
        single=True,
    ),
    "Glm4MoeLiteForCausalLM": Family(model_type="glm4_moe_lite", classes=True),
    "GlmOcrForConditionalGeneration": Family(
        model_type="glm_ocr_text", layers="model.language_model.layers.", classes=True, pairs=True
    ),
    "HYV3ForCausalLM": Family(
        model_type="hy_v3",
        classes=True,
        names={
            "shared_head.norm": "final_layernorm",
            "mlp.gate": "mlp.router.gate",
            "mlp.e_score_correction_bias": "mlp.expert_bias",
            "mlp.shared_experts": "mlp.shared_mlp",
        },
    ),
    **dict.fromkeys(
        ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), Family(model_type="exaone_moe", as_first=True, **QWEN)
    ),
    "Exaone4_5_ForConditionalGeneration": Family(model_type="exaone4", as_first=True, **QWEN),
    "Ernie4_5_MoeForCausalLM": Family(
        model_type="ernie4_5_moe",
        layers="model.mtp_block.",
        behind=False,
        classes=True,
        outside={
            "enorm": "model.mtp_emb_norm.0",
            "hnorm": "model.mtp_hidden_norm.0",
            "eh_proj": "model.mtp_linear_proj.0",
            "shared_head.norm": TARGET_NORM,
        },
        single=True,
    ),
}
"""Families by the target's architecture."""
