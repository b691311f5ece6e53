"""What vLLM with forerun's plug-in answers while its weights change: ``python rollout_answers.py TARGET TRAINED``.

It runs in vLLM's own environment and prints one JSON object: by name, the token ids of an answer, and how many tokens
were drafted for it and accepted.
"""

import json
import sys
from typing import Any

import vllm

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"


def main() -> None:
    """Ask with predictions of several kinds, and with other weights, and print what came of it."""
    target, trained = sys.argv[1:]
    llm = vllm.LLM(
        model=target,
        dtype="float32",
        max_num_seqs=2,
        max_model_len=256,
        enforce_eager=True,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": "custom_class",
            "model": "forerun.deploy.vllm.ForerunProposer",
            "num_speculative_tokens": 5,
        },
    )

    def ask(**said: Any) -> dict[str, Any]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, extra_args=said or None)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        steps = output.outputs[0].spec_decode_metrics
        counts = {"drafted": sum(steps.per_step_drafted), "accepted": sum(steps.per_step_accepted)}
        return {"token_ids": list(output.outputs[0].token_ids), "text": output.outputs[0].text, **counts}

    def load(folder: str) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        llm.reset_prefix_cache()

    found = {"plain": ask()}
    answer = found["plain"]["token_ids"]
    found["token_ids"] = ask(prediction=answer)
    found["text"] = ask(prediction=found["plain"]["text"])
    found["wrong"] = ask(prediction=[10**9])
    load(trained)
    found["trained"] = ask(prediction=answer)
    load(target)
    found["back"] = ask(prediction=answer, group="g")
    sys.stdout.write(json.dumps(found) + "\n")


main()
