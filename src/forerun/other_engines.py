"""Arguments and options of vLLM, SGLang and llama.cpp that forerun does not have, and what takes their place. Imports
no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from forerun.errors import NEAR, nearest

NOT_NEEDED = "is not needed: "
"""So begin the hints at what needs no action."""
_FLAG = re.compile(r"--[a-z][a-z-]*[a-z]")
_OF_GENERATE = frozenset(("--temperature", "--top-p", "--max-tokens", "--seed", "--prompt-file"))

_ADAPTER = "--adapter opens the model with one PEFT adapter"
_CACHE = "the cache is sized in tokens: --kv-cache-tokens, --max-model-len and --max-num-seqs"
_CHUNKED = "is not needed: long prompts are always read in chunks, of --max-num-batched-tokens"
_COMPILED = "is not needed: nothing is compiled; FORERUN_NO_GRAPHS=1 leaves CUDA graphs out"
_DRAFTER = "--drafter names the method, and --drafter-model its model"
_DRAFTED = "it is called -k (--num-speculative-tokens)"
_FIRST = "MODEL is the first word, without an option: forerun"
_LAYERS = "--device says where the model runs: all layers on cuda, or all on cpu"
_LENGTH = "--max-model-len is the longest sequence"
_NOT_LOGGED = "is not needed: no prompt is logged unless forerun serve is given --log-prompts"
_ONE_DEVICE = "one device runs a model; for each further copy start a process"
_OWN_KERNELS = "is not needed: attention over a draft has kernels of its own"
_ROWS = "--max-num-seqs completions run at once"
_REQUESTED = "a request to forerun serve has it, and SamplingParams in Python"
_SAMPLING = (
    "what differs from the checkpoint's generation_config.json stands in a request, or in --temperature and --top-p of "
    "forerun generate"
)
_TALKS = "is not needed: forerun chat holds a conversation, and forerun generate completes one prompt (--raw: as text)"
_TOOLS = "is not needed: forerun serve always reads tool calls (--tool-call-parser says in which form)"
_VARIABLES = "a request to forerun serve brings them, and forerun data has an option for them"
OPTIONS = {
    **dict.fromkeys(("enable-lora", "lora", "lora-modules", "lora-paths", "max-lora-rank", "max-loras"), _ADAPTER),
    **dict.fromkeys(("block-size", "gpu-memory-utilization", "kv-cache-memory-bytes", "mem-fraction-static"), _CACHE),
    **dict.fromkeys(("num-gpu-blocks-override", "max-total-tokens"), _CACHE),
    **dict.fromkeys(("enable-chunked-prefill", "chunked-prefill-size", "batch-size", "b", "ub"), _CHUNKED),
    **dict.fromkeys(("speculative-algorithm", "speculative-draft-model-path", "model-draft", "md"), _DRAFTER),
    **dict.fromkeys(("speculative-model", "spec-type", "assistant-model"), _DRAFTER),
    **dict.fromkeys(("draft", "draft-max", "draft-n", "num-draft-tokens", "num-assistant-tokens"), _DRAFTED),
    **dict.fromkeys(("speculative-num-steps", "speculative-num-draft-tokens"), _DRAFTED),
    **dict.fromkeys(("model", "m", "model-path", "hf", "hf-repo", "hfr"), _FIRST),
    **dict.fromkeys(("n-gpu-layers", "ngl", "gpu-layers"), _LAYERS),
    **dict.fromkeys(("c", "ctx-size", "context-length", "n-ctx"), _LENGTH),
    **dict.fromkeys(("disable-log-requests", "no-enable-log-requests", "enable-log-requests"), _NOT_LOGGED),
    **dict.fromkeys(("tensor-parallel-size", "tp", "tp-size", "pipeline-parallel-size", "split-mode"), _ONE_DEVICE),
    **dict.fromkeys(("data-parallel-size", "distributed-executor-backend", "dp-size"), _ONE_DEVICE),
    **dict.fromkeys(("flash-attn", "fa", "attention-backend"), _OWN_KERNELS),
    **dict.fromkeys(("parallel", "np", "max-running-requests"), _ROWS),
    **dict.fromkeys(("generation-config", "override-generation-config"), _SAMPLING),
    **dict.fromkeys(("cnv", "conversation", "no-cnv", "no-conversation", "i", "interactive"), _TALKS),
    **dict.fromkeys(("enable-auto-tool-choice", "tool-call-parser", "jinja"), _TOOLS),
    **dict.fromkeys(
        ("repeat-penalty", "repetition-penalty", "presence-penalty", "frequency-penalty", "logit-bias"), _REQUESTED
    ),
    **dict.fromkeys(("alias", "a"), "forerun serve calls it --served-model-name"),
    **dict.fromkeys(
        ("threads", "threads-batch", "tb"), "the environment's OMP_NUM_THREADS says how many threads there are"
    ),
    **dict.fromkeys(("n-predict", "max-new-tokens", "max-length"), "it is called --max-tokens, or -n"),
    **dict.fromkeys(("system-prompt", "sys"), "forerun chat calls it --system"),
    "chat-template-kwargs": _VARIABLES,
    "cpu-offload-gb": "LLM(device_map=...) in Python places modules on the CPU",
    "disable-log-stats": "is not needed: forerun serve has its figures at /metrics",
    "disable-radix-cache": "forerun serve calls it --no-enable-prefix-caching",
    "do-sample": "--temperature 0 is greedy, above it tokens are drawn",
    "download-dir": "the environment's HF_HOME says where models are kept",
    "enable-sleep-mode": "is not needed: forerun serve sleeps by POST /sleep, with --allow-weight-updates",
    "enforce-eager": _COMPILED,
    "file": "it is called --prompt-file",
    "hf-token": "the environment's HF_TOKEN, or hf auth login, says it",
    "kv-cache-dtype": "the cache has the model's --dtype; a smaller one would change the outputs",
    "load-format": "is not needed: safetensors and GGUF files are recognised",
    "mlock": "is not needed: weights are read once, and kept",
    "no-mmap": "is not needed: weights are read once, and kept",
    "quantization": "is not needed: the checkpoint says how its weights are quantised (or a GGUF file)",
    "reasoning-format": "forerun serve calls it --reasoning-parser",
    "revision": "fetch it (hf download NAME with that option), and give its directory as MODEL",
    "s": "it is called --seed",
    "swap-space": "is not needed: requests that do not fit are preempted and continue later",
    "temp": "it is called --temperature",
    "tokenizer": "the model's own is taken; LLM(tokenizer=...) in Python takes another",
    "tokenizer-mode": "is not needed: the tokenizer says itself how it is read",
    "trust-remote-code": "the command line runs no code of a checkpoint; LLM(trust_remote_code=True) in Python does",
}
"""Options map to sentences that follow the option's name."""


def in_python(hint: str) -> str:
    """Return a hint of the command line with the names that options have in Python."""
    return _FLAG.sub(lambda flag: flag[0][2:].replace("-", "_"), hint).removeprefix(NOT_NEEDED)


_SPREADS = "a model runs on one device; tp_plan='auto' under torchrun, or device_map, spreads it over several"
_PARAMS = "what differs from the checkpoint's generation_config.json stands in SamplingParams"
_ALIKE = (
    *("enable-lora", "max-lora-rank", "block-size", "gpu-memory-utilization", "kv-cache-memory-bytes"),
    *("num-gpu-blocks-override", "enable-chunked-prefill", "download-dir", "enforce-eager", "kv-cache-dtype"),
    *("load-format", "n-ctx", "n-gpu-layers", "quantization", "swap-space"),
)
ARGUMENTS = {
    **{option.replace("-", "_"): in_python(OPTIONS[option]) for option in _ALIKE},
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend"), _SPREADS),
    **dict.fromkeys(("generation_config", "override_generation_config"), _PARAMS),
    "cpu_offload_gb": "device_map places modules on the CPU, as in transformers",
    "data_parallel_size": "start a process for each copy of the model",
    "disable_log_requests": "an LLM logs no requests",
    "disable_log_stats": "an LLM logs no statistics; they are in each output's speculation",
    "enable_sleep_mode": "LLM.sleep and LLM.wake_up need no preparation",
    "hf_token": "call it token",
    "skip_tokenizer_init": "tokenizer=False works on token ids alone",
    "tokenizer_mode": "transformers chooses the tokenizer; tokenizer=... takes another",
}
"""Arguments of `LLM`, of vLLM and llama-cpp-python, map to what takes their place."""
REQUEST_ARGUMENTS = {
    **dict.fromkeys(
        ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "tools"), "chat() takes it"
    ),
    "chat_template": "LLM(chat_template=...) takes one for all conversations",
    "chat_template_content_format": "the template is asked which form it takes",
    "lora_request": "LLM(adapter=...) opens the model with one PEFT adapter, for all requests",
    "request_id": "each request gets its own, which its chunks and its output name; the steps of one are `async for "
    "chunk in llm.stream(prompt, params)`, and `await llm.generate(prompts, params)` gives whole outputs",
    "prompt_token_ids": "a prompt may be a list of token ids",
    "tokenization_kwargs": "add_special_tokens and the like: give token ids, of llm.encode for example",
}
"""Arguments of vLLM's `LLM.generate`, `LLM.chat` and `AsyncLLM.generate` map to what takes their place."""


def explain_unknown(option: str, known: Collection[str], verb: str) -> str:
    """Return what is said of an option that a verb does not have: what takes its place, or which of the `known` is
    near.
    """
    hint = OPTIONS.get(option.lstrip("-").replace("_", "-"), "")
    if hint == _FIRST:
        hint = f"{hint} {verb} MODEL" if "MODEL" in known else "it is called --target" if "--target" in known else ""
    if not hint:
        return f"Unknown option: {option}.{nearest(option, known, NEAR)}"
    absent = [flag for flag in _FLAG.findall(hint) if flag not in known]
    if absent and "forerun" not in hint:
        hint += f" (in forerun {'generate' if _OF_GENERATE.issuperset(absent) else 'serve'})"
    return f"{option} {hint}" if hint.startswith(NOT_NEEDED) else f"{option} is not an option of this command: {hint}"
