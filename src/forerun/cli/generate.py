"""``forerun generate MODEL --prompt ...`` answers one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from forerun.cli import console, options, session
from forerun.cli.options import Flag, Json, read_prompt
from forerun.errors import ArgumentError


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
    """Answer one prompt, with speculation if a drafter is named. A model with a chat template is talked to.

    Parameters
    ----------
    model
        Directory or hub id of a Hugging Face causal LM, or a GGUF file; `smollm2` is a small one, fetched once.
    prompt
        The prompt; read from stdin if neither this nor --prompt-file is given.
    prompt_file
        File that holds the prompt.
    prediction_file
        File that holds what the answer will be like, for the drafter `prediction`, which is taken if none is named.
    raw
        Let the model continue the prompt as it stands. Else it is a user's message where the model has a chat template.
    show_draft
        Colour every token by its source: accepted draft, recovered, bonus or plain.
    """
    text = read_prompt(prompt, prompt_file)
    if not text:
        raise ArgumentError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, or pipe it in")
    config, params = speculation.config(), sampling.params()
    expected = {} if prediction_file is None else {"prediction": read_prompt(None, prediction_file)}

    config = config or ({"method": "prediction"} if expected else None)
    llm = session.load(model, loading, config, announce=not json, max_num_seqs=1)
    templated = llm.has_chat_template and not raw
    given = llm.chat_prompt([{"role": "user", "content": text}]) if templated else {"prompt": text}
    if json:
        output = llm.generate([{**given, **expected}], params)[0]
        console.write_json(session.answer_record(output, with_tokens=show_draft))
        return 0
    log, chunks = console.log(), llm.stream({**given, **expected}, params)
    log.print(session.describe_asking(llm, params, templated=templated))
    finished = session.print_stream(chunks, show_draft=show_draft)
    if show_draft:
        log.print(session.legend(log))
    if finished is not None:
        log.print(session.statistics_line(finished))
    return 0
