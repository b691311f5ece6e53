"""``forerun generate MODEL --prompt ...`` completes one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from forerun.cli import console, options, session
from forerun.cli.options import Flag, Json, read_prompt
from forerun.errors import ArgumentError

_TOGETHER = 8  # Prompts of a file that are completed at once


def generate(
    model: str,
    /,
    *,
    prompt: Annotated[str | None, Parameter(alias="-p", allow_leading_hyphen=True)] = None,
    prompt_file: Path | None = None,
    prediction_file: Path | None = None,
    raw: Flag = False,
    show_draft: Flag = False,
    json: Json = False,
    speculation: options.SpeculationOptions = options.SPECULATION,
    sampling: options.SamplingOptions = options.SAMPLING,
    loading: options.TargetOptions = options.LOADING,
) -> int:
    """Complete one prompt, with speculation if a drafter is named. A model with a chat template is talked to.

    Parameters
    ----------
    model
        Directory or hub id of a Hugging Face causal LM, or a GGUF file; `smollm2` is a small one, fetched once.
    prompt
        The prompt; read from stdin if neither this nor --prompt-file is given.
    prompt_file
        File that holds the prompt; a .jsonl file with --json holds many, each line with 'prompt', 'messages' or
        'turns', and a line of JSON is printed for each.
    prediction_file
        File with the expected completion, for the drafter `prediction`, which is taken if none is named.
    raw
        Let the model continue the prompt as it stands. Else it is a user's message where the model has a chat template.
    show_draft
        Colour every token by its source: accepted draft, recovered, bonus or plain.
    """
    if prompt is None and prompt_file is not None and prompt_file.suffix in (".jsonl", ".ndjson"):
        if not json:
            raise ArgumentError(f"{prompt_file} holds many prompts, whose completions are lines of JSON: add --json")
        if prediction_file is not None:
            raise ArgumentError("--prediction-file is of one prompt, and a .jsonl file holds many: leave it out")
        return _answer_many(model, prompt_file, speculation, sampling, loading, raw=raw, with_tokens=show_draft)
    text = read_prompt(prompt, prompt_file)
    if not text:
        raise ArgumentError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, or pipe it in")
    config = speculation.config()
    params = sampling.params()
    expected = {} if prediction_file is None else {"prediction": read_prompt(None, prediction_file)}

    config = config or ({"method": "prediction"} if expected else None)
    llm = session.load(model, loading, config, announce=not json, max_num_seqs=1)
    from forerun.plan.measured import make_request

    request: Any = make_request(llm, text, raw=raw)
    if json:
        output = llm.generate([{**request, **expected}], params)[0]
        console.write_json(session.answer_record(output, with_tokens=show_draft))
        return 0
    log = console.log()
    chunks = llm.stream({**request, **expected}, params)
    log.print(session.describe_asking(llm, params, raw=raw))
    finished = session.print_stream(chunks, show_draft=show_draft)
    if show_draft:
        session.print_legend(log)
    if finished is not None:
        log.print(session.statistics_line(finished))
    return 0


def _answer_many(
    model: str,
    prompt_file: Path,
    speculation: options.SpeculationOptions,
    sampling: options.SamplingOptions,
    loading: options.TargetOptions,
    *,
    raw: bool,
    with_tokens: bool,
) -> int:
    """Complete every prompt of a file, and print a line of JSON for each, in the file's order."""
    from forerun.plan.prompts import read_prompts

    prompts = read_prompts(prompt_file)
    params = sampling.params()
    llm = session.load(model, loading, speculation.config(), max_num_seqs=min(len(prompts), _TOGETHER))
    from forerun.plan.measured import make_request

    requests = [make_request(llm, prompt, raw=raw) for prompt in prompts]
    for output in llm.generate(requests, params):
        console.write_json(session.answer_record(output, with_tokens=with_tokens))
    return 0
