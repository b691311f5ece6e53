"""Options of `forerun deploy`, and the command that it prints for them; the engines' own parsers read these, too."""

import re
import shlex

HEAD = ("--drafter", "eagle3", "--drafter-model", "owner/head", "-k", "5")
SMALL = ("--drafter", "draft_model", "--drafter-model", "owner/small")
SPREAD = ("m", "--tp", "2", "--nodes", "2", "--head-address", "h")
MERGED = ("--drafter", "merge", "--drafter-option", 'drafters=["suffix", "ngram"]')

VLLM = "vllm serve owner/m --port 8000"
DRAFTS = f"{VLLM} --speculative-config "
SGLANG = "python -m sglang.launch_server --model-path owner/m --port 8000"
EAGLE = f"{SGLANG} --speculative-algorithm EAGLE3 --speculative-draft-model-path owner/head --speculative-num-steps 5"
LLAMA = "llama-server -m m.gguf --port 8000 --spec-type"
PLUG_IN = """CONFIG='{"method": "merge", "drafters": ["suffix", "ngram"]}'"""
GOLDEN: dict[tuple[str, ...], str] = {
    ("vllm", "owner/m"): VLLM,
    ("vllm", "owner/m", *HEAD, "--tp", "2"): (
        f"{VLLM} --tensor-parallel-size 2 --speculative-config "
        """'{"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 5}'"""
    ),
    ("vllm", "owner/m", "--drafter", "ngram", "-k", "6", "--drafter-option", "prompt_lookup_max=3"): DRAFTS
    + """'{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'""",
    ("vllm", "owner/m", *SMALL, "--rule", "block"): DRAFTS
    + """'{"method": "draft_model", "model": "owner/small", "num_speculative_tokens": 5, """
    """"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}'""",
    ("vllm", "owner/m", "--speculative-config", '{"method": "suffix", "suffix_decoding_max_tree_depth": 30}'): DRAFTS
    + """'{"method": "suffix", "num_speculative_tokens": 24, "suffix_decoding_max_tree_depth": 30, """
    """"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 4.0, """
    """"suffix_decoding_min_token_prob": 0.1}'""",
    ("vllm", "owner/m", "--drafter", "pard", "--drafter-model", "o/p", "--port", "9000"): (
        "vllm serve owner/m --port 9000 --speculative-config "
        """'{"method": "draft_model", "model": "o/p", "num_speculative_tokens": 8, "parallel_drafting": true}'"""
    ),
    ("vllm", "owner/m", "--drafter", "tli", "--drafter-model", "o/small", "--rule", "token_rejection"): DRAFTS
    + """'{"method": "draft_model", "model": "o/small", "num_speculative_tokens": 5, """
    """"use_heterogeneous_vocab": true, "rejection_sample_method": "standard"}'""",
    ("vllm", "owner/m", "--drafter", "mtp"): DRAFTS + """'{"method": "mtp", "num_speculative_tokens": 3}'""",
    ("vllm", "owner/m", *MERGED): (
        f"VLLM_USE_V2_MODEL_RUNNER=0 FORERUN_VLLM_{PLUG_IN} {VLLM} --no-async-scheduling --speculative-config "
        """'{"method": "custom_class", "model": "forerun.deploy.vllm.ForerunProposer", "num_speculative_tokens": 24}'"""
    ),
    ("vllm", *SPREAD): "vllm serve m --port 8000 --tensor-parallel-size 2 --nnodes 2 --node-rank 0 --master-addr h",
    ("sglang", "owner/m", *MERGED): (
        f"FORERUN_SGLANG_{PLUG_IN} {SGLANG} --speculative-algorithm FORERUN --speculative-num-draft-tokens 16"
    ),
    ("sglang", *SPREAD): (
        "python -m sglang.launch_server --model-path m --port 8000 --tp-size 2 --dist-init-addr h:20000 --nnodes 2 "
        "--node-rank 0"
    ),
    ("sglang", "owner/m", *HEAD): f"{EAGLE} --speculative-eagle-topk 1 --speculative-num-draft-tokens 6",
    ("sglang", "owner/m", *HEAD, "--drafter-option", "top_k=4", "--drafter-option", "nodes=15"): (
        f"{EAGLE} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    ),
    ("sglang", "owner/m", *HEAD, "--drafter-option", "top_k=2"): (  # 2 + 4 x 4 nodes to choose from
        f"{EAGLE} --speculative-eagle-topk 2 --speculative-num-draft-tokens 19"
    ),
    ("sglang", "owner/m", "--drafter", "dspark", "--drafter-model", "o/h"): (  # its file says how many
        f"{SGLANG} --speculative-algorithm DSPARK --speculative-draft-model-path o/h"
    ),
    ("sglang", "owner/m", "--drafter", "dspark", "--drafter-model", "o/h", "-k", "3"): (
        f"{SGLANG} --speculative-algorithm DSPARK --speculative-draft-model-path o/h --speculative-dspark-block-size 3 "
        "--speculative-num-draft-tokens 4"
    ),
    ("sglang", "owner/m", "--drafter", "ngram"): (
        f"{SGLANG} --speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 --speculative-num-draft-tokens 9"
    ),
    ("sglang", "owner/m", *SMALL, "--tp", "2", "--pp", "2"): (
        f"{SGLANG} --tp-size 2 --pp-size 2 --speculative-algorithm STANDALONE --speculative-draft-model-path "
        "owner/small --speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
    ),
    ("trtllm", "owner/m", *HEAD, "--tp", "4"): "trtllm-serve owner/m --port 8000 --tp_size 4 --config trtllm.yaml",
    ("trtllm", "owner/m", *HEAD, "--tp", "16", "--nodes", "2"): (
        "srun -N 2 --ntasks-per-node 8 --mpi=pmix trtllm-llmapi-launch trtllm-serve owner/m --port 8000 --tp_size 16 "
        "--config trtllm.yaml --gpus_per_node 8"
    ),
    ("llamacpp", "m.gguf", "--drafter", "ngram"): (
        f"{LLAMA} ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8 --spec-ngram-simple-min-hits 1"
    ),
    ("llamacpp", "owner/m-GGUF", "--drafter", "draft_model", "--drafter-model", "d.gguf", "--tp", "2"): (
        "llama-server -hf owner/m-GGUF --port 8000 --split-mode tensor --spec-type draft-simple "
        "--spec-draft-model d.gguf --spec-draft-n-max 5"
    ),
    ("llamacpp", "m.gguf", "--drafter", "mtp"): f"{LLAMA} draft-mtp --spec-draft-n-max 3",
    ("dynamo", "owner/m", *HEAD): "python -m dynamo.frontend --http-port 8000 --discovery-backend file",
}


def arguments_of(engine: str, program: str) -> list[list[str]]:
    """What an engine's program is given by each of its commands."""
    found = list[list[str]]()
    for asked, line in GOLDEN.items():
        if asked[0] == engine:
            words = shlex.split(line)
            while re.match(r"[A-Z_0-9]+=", words[0]):
                words.pop(0)
            own = shlex.split(program)
            assert words[: len(own)] == own, line
            found.append(words[len(own) :])
    return found
