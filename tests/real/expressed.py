"""One trained model as other architectures have it: the weights of SmolLM2 in the tensors of Gemma, Phi 3, Mixtral, ...

Most compute the same function, up to rounding, through other modules: joint projections, norms of ``1 + w``, scaled
embeddings, interleaved ropes, experts. Where an architecture has a norm more (`NEAR`), that norm gives its input back
the size that it has on average, and the model is another one, but still a trained one.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

State = dict[str, Tensor]
Form = Callable[["Source"], tuple[Any, State]]

SPIKE, SPIKED = 1024.0, (3, 100, 300)  # Factor, and channels, of the norms that are made large
TEXT = "The keeper of the lighthouse wrote down the weather four times a day. His books are used by people who study "


class Source:
    """The model whose weights are expressed, a Llama, in float32."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.hidden: int = model.config.hidden_size
        self.heads: int = model.config.num_attention_heads
        self.kv_heads: int = model.config.num_key_value_heads
        self.depth: int = model.config.head_dim
        self.layers: int = model.config.num_hidden_layers

    def state(self, *, tied: bool = True) -> State:
        """Copies of all tensors, the head's among them unless the embedding is it."""
        found = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        if tied:
            del found["lm_head.weight"]
        return found

    def shape(self, **more: Any) -> dict[str, Any]:
        """What the configurations of all architectures call alike."""
        keys = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim max_position_embeddings rms_norm_eps rope_parameters bos_token_id eos_token_id pad_token_id "
            "tie_word_embeddings"
        )
        return {key: getattr(self.config, key) for key in keys.split()} | more

    def sizes(self, pattern: str) -> Callable[[str], float]:
        """Root mean square of the states that the modules with such names give on a text, by layer number."""
        found = dict[str, float]()

        def note(name: str, output: Any) -> None:
            states = (output[0] if isinstance(output, tuple) else output)[0, 4:]
            found[re.findall(r"\d+", name)[0]] = float(states.square().mean(-1).sqrt().mean())

        handles = [
            module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
            for name, module in self.model.named_modules()
            if re.search(pattern, name)
        ]
        with torch.inference_mode():
            self.model(torch.tensor([list(TEXT.encode())]) % 997 + 300)
        for handle in handles:
            handle.remove()
        return found.__getitem__


def _renamed(state: State, *pairs: tuple[str, str]) -> State:
    for pattern, new in pairs:
        state = {re.sub(pattern, new, name): weight for name, weight in state.items()}
    return state


def _each(state: State, pattern: str, change: Callable[[Tensor], Tensor]) -> State:
    return {name: change(weight) if re.search(pattern, name) else weight for name, weight in state.items()}


def _joined(state: State, parts: tuple[str, ...], joint: str) -> State:
    """The matrices with these names below each other."""
    found = {name: weight for name, weight in state.items() if not re.search(rf"\.({'|'.join(parts)})\.", name)}
    for name in (name for name in state if f".{parts[0]}." in name):
        own = [state[name.replace(parts[0], part)] for part in parts]
        found[name.replace(parts[0], joint)] = torch.cat(own)
    return found


def _interleaved(source: Source, state: State) -> State:
    """The rows of queries and keys for ropes that turn neighbours."""

    def moved(weight: Tensor) -> Tensor:
        return weight.view(-1, 2, source.depth // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)

    return _each(state, r"\.[qk]_proj\.", moved)


def _with_biases(state: State, pattern: str) -> State:
    """Biases of nothing for such matrices."""
    found = {name: torch.zeros(len(weight)) for name, weight in state.items() if re.search(pattern, name)}
    return state | {name.replace("weight", "bias"): bias for name, bias in found.items()}


def _spiked(state: State) -> State:
    """Norms whose weights reach thousands, and matrices that undo that: as some published models have them."""
    up = torch.ones_like(state["model.norm.weight"])
    up[list(SPIKED)] = SPIKE
    before = {"input_layernorm": r"\.[qkv]_proj\.", "post_attention_layernorm": r"\.(gate|up)_proj\."}
    for norm, matrices in before.items():
        state = _each(_each(state, norm, lambda weight: weight * up), matrices, lambda weight: weight / up)
    return state


def llama(source: Source) -> tuple[Any, State]:
    return transformers.LlamaConfig(**source.shape()), source.state()


def llama_spiked(source: Source) -> tuple[Any, State]:
    return transformers.LlamaConfig(**source.shape()), _spiked(source.state())


def llama_padded(source: Source) -> tuple[Any, State]:
    """More rows than the tokenizer has tokens; the additional ones are never likely."""
    state = source.state()
    rows = state["model.embed_tokens.weight"]
    more = -rows.mean(0, keepdim=True).expand(128, -1)
    state["model.embed_tokens.weight"] = torch.cat([rows, more])
    return transformers.LlamaConfig(**source.shape(vocab_size=len(rows) + 128)), state


def llama_scaled_rope(source: Source) -> tuple[Any, State]:
    """Another function: a rope that is stretched as Llama 3.1's, of an original context that the text is within."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"rope_theta": source.config.rope_parameters["rope_theta"], "original_max_position_embeddings": 8192}
    return transformers.LlamaConfig(**source.shape(rope_parameters=rope, max_position_embeddings=65536)), source.state()


def mistral_window(source: Source) -> tuple[Any, State]:
    """Another function behind 40 tokens."""
    return transformers.MistralConfig(**source.shape(sliding_window=40)), source.state()


def qwen2(source: Source) -> tuple[Any, State]:
    return transformers.Qwen2Config(**source.shape()), _with_biases(source.state(), r"\.[qkv]_proj\.")


def phi3(source: Source) -> tuple[Any, State]:
    state = _joined(source.state(), ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    config = transformers.Phi3Config(**source.shape(original_max_position_embeddings=8192))
    return config, _joined(state, ("gate_proj", "up_proj"), "gate_up_proj")


def _one_less(state: State) -> State:
    """For norms that multiply by 1 + w."""
    return _each(state, "norm", lambda weight: weight - 1)


def _scaled_embedding(source: Source, state: State) -> State:
    """For models that multiply embeddings by the square root of their size."""
    return _each(state, "embed_tokens", lambda weight: weight / source.hidden**0.5)


def gemma(source: Source) -> tuple[Any, State]:
    state = _scaled_embedding(source, _one_less(source.state(tied=False)))
    return transformers.GemmaConfig(**source.shape(tie_word_embeddings=False, hidden_act="silu")), state


def gemma_spiked(source: Source) -> tuple[Any, State]:
    state = _scaled_embedding(source, _one_less(_spiked(source.state(tied=False))))
    return transformers.GemmaConfig(**source.shape(tie_word_embeddings=False, hidden_act="silu")), state


def vaultgemma(source: Source) -> tuple[Any, State]:
    """Soft caps that no logit comes near, and windows as long as the context in every other layer."""
    state = _scaled_embedding(source, _one_less(source.state(tied=False)))
    shape = source.shape(tie_word_embeddings=False, hidden_activation="silu", query_pre_attn_scalar=source.depth)
    caps = {"final_logit_softcapping": 1e4, "attn_logit_softcapping": 1e4, "sliding_window": 4096}
    return transformers.VaultGemmaConfig(**shape, **caps), _renamed(
        state, ("post_attention_layernorm", "pre_feedforward_layernorm")
    )


def _four_norms(source: Source) -> State:
    state = _renamed(source.state(tied=False), ("post_attention_layernorm", "pre_feedforward_layernorm"))
    attended, mixed = source.sizes(r"self_attn$"), source.sizes(r"mlp$")
    for layer in map(str, range(source.layers)):
        at = f"model.layers.{layer}"
        state[f"{at}.post_attention_layernorm.weight"] = torch.full((source.hidden,), attended(layer))
        state[f"{at}.post_feedforward_layernorm.weight"] = torch.full((source.hidden,), mixed(layer))
    return _scaled_embedding(source, _one_less(state))


def _head_norms(source: Source, state: State) -> State:
    queries, keys = source.sizes(r"q_proj$"), source.sizes(r"k_proj$")
    for layer in map(str, range(source.layers)):
        at = f"model.layers.{layer}.self_attn"
        state[f"{at}.q_norm.weight"] = torch.full((source.depth,), queries(layer))
        state[f"{at}.k_norm.weight"] = torch.full((source.depth,), keys(layer))
    return state


def gemma2(source: Source) -> tuple[Any, State]:
    shape = source.shape(tie_word_embeddings=False, hidden_activation="silu", query_pre_attn_scalar=source.depth)
    return transformers.Gemma2Config(**shape, sliding_window=40), _four_norms(source)


def qwen3(source: Source) -> tuple[Any, State]:
    return transformers.Qwen3Config(**source.shape()), _head_norms(source, source.state())


def granite(source: Source) -> tuple[Any, State]:
    state = _each(source.state(tied=False), "embed_tokens", lambda weight: weight / 12)
    state = _each(state, "(o|down)_proj", lambda weight: weight / 0.22)
    state = _each(state, "lm_head", lambda weight: weight * 8)
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
    shape = source.shape(tie_word_embeddings=False, attention_multiplier=source.depth**-0.5)
    return transformers.GraniteConfig(**shape, **multipliers), state


def glm(source: Source) -> tuple[Any, State]:
    rope = {**source.config.rope_parameters, "partial_rotary_factor": 1.0}
    state = _joined(_interleaved(source, source.state()), ("gate_proj", "up_proj"), "gate_up_proj")
    state = _with_biases(state, r"\.[qkv]_proj\.")
    return transformers.GlmConfig(**source.shape(attention_bias=True, rope_parameters=rope)), state


def mixtral(source: Source) -> tuple[Any, State]:
    """Every expert is the MLP, so that the shares, which sum to one, count nothing."""
    state, experts = source.state(), 2
    for layer in range(source.layers):
        at = f"model.layers.{layer}.mlp"
        gate, up, down = (state.pop(f"{at}.{name}_proj.weight") for name in ("gate", "up", "down"))
        state[f"{at}.experts.gate_up_proj"] = torch.cat([gate, up]).expand(experts, -1, -1).clone()
        state[f"{at}.experts.down_proj"] = down.expand(experts, -1, -1).clone()
        state[f"{at}.gate.weight"] = gate[:experts].clone()
    return transformers.MixtralConfig(**source.shape(num_local_experts=experts, num_experts_per_tok=2)), state


def stablelm(source: Source) -> tuple[Any, State]:
    """Every state stands there twice, the second time negated: so its mean is zero, and a layer norm of it is a
    root-mean-square norm."""
    zero = torch.zeros(source.hidden)
    state = _each(source.state(tied=False), "norm", lambda weight: torch.cat([weight, weight]))
    state = _each(state, r"(embed_tokens)", lambda weight: torch.cat([weight, -weight], 1))
    state = _each(state, r"(q|k|v|gate|up)_proj|lm_head", lambda weight: torch.cat([weight, -weight], 1) / 2)
    state = _each(state, r"(o|down)_proj", lambda weight: torch.cat([weight, -weight]))
    state |= {
        name.replace("weight", "bias"): torch.cat([zero, zero])
        for name in state
        if "layernorm" in name or name == "model.norm.weight"
    }
    # Its heads' size follows from the width of the states: of twice as many heads half are empty, as keys and values.
    width = source.heads * source.depth

    def padded(weight: Tensor) -> Tensor:
        return torch.cat([weight, weight.new_zeros(2 * width - len(weight), weight.shape[1])])

    state = _each(state, r"q_proj", padded)
    state = _each(state, r"[kv]_proj", lambda weight: torch.cat([weight, torch.zeros_like(weight)]))
    state = _each(state, r"o_proj", lambda weight: torch.cat([weight, torch.zeros_like(weight)], 1))
    rope = {**source.config.rope_parameters, "partial_rotary_factor": 1.0}
    shape = source.shape(tie_word_embeddings=False, rope_parameters=rope, layer_norm_eps=source.config.rms_norm_eps)
    shape |= {"hidden_size": 2 * source.hidden, "num_attention_heads": 2 * source.heads}
    return transformers.StableLmConfig(**shape | {"num_key_value_heads": 2 * source.kv_heads}), state


SAME: Mapping[str, Form] = {
    form.__name__: form
    for form in (
        llama,
        llama_spiked,
        llama_padded,
        qwen2,
        phi3,
        gemma,
        gemma_spiked,
        vaultgemma,
        granite,
        glm,
        mixtral,
        stablelm,
    )
}
"""Those that compute what the source computes."""
NEAR: Mapping[str, Form] = {form.__name__: form for form in (llama_scaled_rope, mistral_window, gemma2, qwen3)}
"""Those that compute something else."""


def expressed(form: Form, source: Source) -> Any:
    """The model, in float32."""
    config, state = form(source)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.generation_config = source.model.generation_config
    return model.eval()
