"""The engine without a server: answers the JSON lines that it is sent. A process of its own, as the servers are.

``python bare.py MODEL CONFIG``; a line in is a list of prompts, a line out is ``{"tokens": ..., "seconds": ...}``.
"""

from __future__ import annotations

import json
import sys
import time

from forerun import LLM, SamplingParams

if __name__ == "__main__":
    model, config, tokens, context = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    llm = LLM(model, speculative_config=config, max_num_seqs=16, max_model_len=context)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        began, count = time.perf_counter(), 0
        for prompt in json.loads(line):
            count += len(llm.generate(prompt, params)[0].outputs[0].token_ids)
        sys.stdout.write(json.dumps({"tokens": count, "seconds": time.perf_counter() - began}) + "\n")
        sys.stdout.flush()
