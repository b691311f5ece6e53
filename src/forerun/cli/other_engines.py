"""Options of vLLM, SGLang and llama.cpp that forerun does not have, and what takes their place. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.errors import nearest

_ADAPTER = "--adapter opens the model with one PEFT adapter"
_CACHE = "forerun serve sizes its cache in tokens: --kv-cache-tokens, --max-model-len and --max-num-seqs"
_CHUNKED = "is not needed: long prompts are always read in chunks, in forerun serve of --max-num-batched-tokens"
_DRAFTER = "--drafter names the method, and --drafter-model its model"
_FIRST = "MODEL is the first word, without an option: forerun serve MODEL"
_LAYERS = "--device says where the model runs: all layers on cuda, or all on cpu"
_LENGTH = "--max-model-len is the longest sequence"
_NOT_LOGGED = "is not needed: no prompt is logged unless forerun serve is given --log-prompts"
_ONE_DEVICE = "one device runs a model; for each further copy start a process"
_ROWS = "forerun serve completes --max-num-seqs at once"
_SAMPLING = (
    "what differs from the checkpoint's generation_config.json stands in a request, or in --temperature, --top-p ..."
)
_TOOLS = "is not needed: forerun serve always reads tool calls (--tool-call-parser says in which form)"
_VARIABLES = "a request to forerun serve brings them, and forerun data has an option for them"
INSTEAD = {
    **dict.fromkeys(("enable-lora", "lora", "lora-modules", "lora-paths", "max-lora-rank", "max-loras"), _ADAPTER),
    **dict.fromkeys(("block-size", "gpu-memory-utilization", "kv-cache-memory-bytes", "mem-fraction-static"), _CACHE),
    **dict.fromkeys(("num-gpu-blocks-override", "max-total-tokens"), _CACHE),
    **dict.fromkeys(("enable-chunked-prefill", "chunked-prefill-size", "batch-size"), _CHUNKED),
    **dict.fromkeys(("speculative-algorithm", "speculative-draft-model-path", "model-draft", "md"), _DRAFTER),
    **dict.fromkeys(("speculative-model", "spec-type"), _DRAFTER),
    **dict.fromkeys(("model", "m", "model-path", "hf", "hf-repo"), _FIRST),
    **dict.fromkeys(("n-gpu-layers", "ngl", "gpu-layers"), _LAYERS),
    **dict.fromkeys(("c", "ctx-size", "context-length"), _LENGTH),
    **dict.fromkeys(("disable-log-requests", "no-enable-log-requests", "enable-log-requests"), _NOT_LOGGED),
    **dict.fromkeys(("tensor-parallel-size", "tp", "tp-size", "pipeline-parallel-size"), _ONE_DEVICE),
    **dict.fromkeys(("data-parallel-size", "distributed-executor-backend", "dp-size"), _ONE_DEVICE),
    **dict.fromkeys(("parallel", "np", "max-running-requests"), _ROWS),
    **dict.fromkeys(("generation-config", "override-generation-config"), _SAMPLING),
    **dict.fromkeys(("enable-auto-tool-choice", "tool-call-parser", "jinja"), _TOOLS),
    **dict.fromkeys(("draft", "draft-max", "speculative-num-steps", "speculative-num-draft-tokens"), "it is called -k"),
    **dict.fromkeys(("alias", "a"), "forerun serve calls it --served-model-name"),
    **dict.fromkeys(("threads", "threads-batch"), "the environment's OMP_NUM_THREADS says how many threads there are"),
    "chat-template-kwargs": _VARIABLES,
    "cpu-offload-gb": "LLM(device_map=...) in Python places modules on the CPU",
    "disable-log-stats": "is not needed: forerun serve has its figures at /metrics",
    "disable-radix-cache": "forerun serve calls it --no-enable-prefix-caching",
    "download-dir": "the environment's HF_HOME says where models are kept",
    "enable-sleep-mode": "is not needed: forerun serve sleeps by POST /sleep, with --allow-weight-updates",
    "enforce-eager": "is not needed: nothing is compiled; FORERUN_NO_GRAPHS=1 leaves CUDA graphs out",
    "hf-token": "the environment's HF_TOKEN, or hf auth login, says it",
    "kv-cache-dtype": "the cache has the model's --dtype; a smaller one would change the outputs",
    "load-format": "is not needed: safetensors and GGUF files are recognised",
    "n-predict": "it is called --max-tokens",
    "quantization": "is not needed: the checkpoint says how its weights are quantised (or a GGUF file)",
    "reasoning-format": "forerun serve calls it --reasoning-parser",
    "revision": "fetch it with hf download NAME --revision REVISION, and give its directory as MODEL",
    "swap-space": "is not needed: requests that do not fit are preempted and continue later",
    "temp": "it is called --temperature",
    "tokenizer": "the model's own is taken; LLM(tokenizer=...) in Python takes another",
    "tokenizer-mode": "is not needed: the tokenizer says itself how it is read",
    "trust-remote-code": "the command line runs no code of a checkpoint; LLM(trust_remote_code=True) in Python does",
}
"""Names without leading dashes map to sentences that follow the option's name; "is not needed" begins those that need
no action.
"""
NEAR = 0.8
"""The least share of equal letters of a name that is suggested for another: one letter in five is wrong."""


def explain_unknown(option: str, known: Iterable[str]) -> str:
    """Return what is said of an option that a verb does not have: what takes its place, or which is near."""
    hint = INSTEAD.get(option.lstrip("-").replace("_", "-"))
    if hint is None:
        return f"Unknown option: {option}.{nearest(option, known, NEAR)}"
    return f"{option} {hint}" if hint.startswith("is not") else f"{option} is not an option of this command: {hint}"
