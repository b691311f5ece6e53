"""``forerun data`` makes training data for draft heads: prompts, completions, and both as tokens."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from forerun.cli import console, session
from forerun.cli.options import (
    LOADING,
    SPECULATION,
    AnswerLength,
    Flag,
    Json,
    SkipBad,
    SpeculationOptions,
    TargetOptions,
    json_object,
)
from forerun.errors import ArgumentError, refuse
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.training.data.drawn import PromptDraw
    from forerun.training.data.regenerate import AnswerRun

TemplateVariables = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,
        help="JSON, variables of the chat template, e.g. '{\"enable_thinking\": false}'; of both verbs alike.",
    ),
]

data = App(name="data", help="Prepare training data, or let the target write it, prompts included.")


@data.command
def prepare(
    *files: Path,
    target: str,
    output: Path,
    max_length: int = 2048,
    split_long: Flag = False,
    skip_bad: SkipBad = False,
    last_turn_only: Flag = False,
    answer_tokens: int = 0,
    chat_template_kwargs: TemplateVariables = None,
    draft_vocab_size: int | None = None,
    json: Json = False,
) -> int:
    """Tokenize data files, mark what the assistant wrote, and store both for training.

    Parameters
    ----------
    files
        JSONL, JSON or parquet with `messages`, ShareGPT `conversations`, `prompt` and `completion`, or `text`;
        any other file is plain text.
    target
        Directory or hub id of the model whose tokenizer and chat template to use; `demo` is the demo model.
    output
        Directory to write; must not hold anything yet.
    max_length
        Tokens of the longest document.
    split_long
        Split longer documents instead of cutting them off.
    last_turn_only
        Count only the last answer of each conversation, for chat templates that rewrite earlier turns.
    answer_tokens
        Room for the answer to a conversation that ends with its user, which `objective.writer=target` writes while a
        head trains; 0: such a conversation is an error.
    draft_vocab_size
        Say how much of the answers a draft vocabulary of this size covers, and how much of documents that it was not
        chosen from.
    """
    from forerun.training.data.prepare import prepare as convert
    from forerun.training.data.store import about_answers
    from forerun.writing import TokenizerIdentity

    how: dict[str, Any] = {
        "max_length": max_length,
        "split_long": split_long,
        "last_turn_only": last_turn_only,
        "answer_tokens": answer_tokens,
        "chat_template_kwargs": _variables(chat_template_kwargs),
    }
    tokenizer = session.load_tokenizer(target)
    vocabulary = TokenizerIdentity.of(tokenizer).vocab_size
    if draft_vocab_size is not None and not 1 <= draft_vocab_size <= vocabulary:
        raise ArgumentError(
            f"--draft-vocab-size must be 1 to {vocabulary}, the target's vocabulary, got {draft_vocab_size}"
        )
    with console.progress_bar("preparing") as update:
        how |= {"skip_bad": skip_bad, "on_record": lambda count: update(completed=count)}
        done = convert(files, tokenizer, output, name=target, **how)
    summary = done.summary()
    if draft_vocab_size is not None:
        from forerun.training.data.store import draft_coverage

        [coverage] = draft_coverage(done.data, vocabulary, [draft_vocab_size])
        summary["draft_vocabulary"] = asdict(coverage)
    for complaint in done.complaints:
        console.warn(f"skipped: {complaint}")
    for sentence in about_answers(done.data):
        console.warn(sentence)
    if json:
        console.write_json(summary)
    else:
        _show_prepared(summary)
    return 0


def _show_prepared(summary: dict[str, Any]) -> None:
    out = console.out()
    share = summary["counted_tokens"] / summary["tokens"]
    out.print(
        f"{summary['output']}: {summary['documents']:,} documents, {summary['tokens']:,} tokens, "
        f"{summary['counted_tokens']:,} ({share:.1%}) count"
    )
    notes = {
        "skipped": "records skipped",
        "cut": f"longer than {summary['max_length']} tokens, cut or split",
        "dropped": "dropped: no token counts",
        "empty": "completions are empty: they are not learned",
        "unwritten": "prompts, to be completed while a head trains (objective.writer=target)",
    }
    shown = [f"{summary[key]:,} {words}" for key, words in notes.items() if summary[key]]
    if shown:
        out.print("; ".join(shown))
    if "draft_vocabulary" in summary:
        vocabulary = summary["draft_vocabulary"]
        seen, unseen = vocabulary["coverage"], vocabulary["held_out_coverage"]
        out.print(f"a draft vocabulary of {vocabulary['size']:,} covers {seen:.2%} of the tokens that count")
        if unseen is None:
            out.print("with a single document nobody can say what it covers of other text")
        else:
            out.print(
                f"chosen from four fifths of the documents it covers {unseen:.2%} of the others, and so of new text"
            )


@data.command
def delete_traffic(folder: Path, *, api_key: Annotated[str | None, Parameter(env_var="FORERUN_API_KEY")] = None) -> int:
    """Delete what a server recorded of one API key; it may go on recording.

    Parameters
    ----------
    folder
        Directory that forerun serve --record-traffic was given.
    api_key
        Whose conversations to delete; if not given those of requests without a key.
    """
    from forerun.serve.traffic import delete, owner_of

    if not folder.is_dir():
        raise ArgumentError(f"there is no directory {folder}; name the one that --record-traffic was given")
    count = delete(folder, owner_of(api_key))
    if not count:
        whose = "requests without a key" if api_key is None else "this key"
        raise ArgumentError(f"{folder} holds no traffic of {whose}; nothing was deleted")
    console.out().print(f"deleted {count} file{'s' if count > 1 else ''}")
    return 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class DrawOptions:
    """The options that say how many prompts are drawn, how, and which ones may not come."""

    target: str = field(kw_only=False)
    """Directory or hub id of a chat model, which writes the prompts itself."""
    output: Path
    """JSONL to append to; prompts that are in it already count."""
    count: int = 1000
    """Prompts that the file is to have."""
    avoid: tuple[Path, ...] = ()
    """Files of prompts that are held out: none is drawn that shares ten words in a row with one of them."""
    temperature: Annotated[float, Parameter(alias="-t")] = 1.0
    """1 is what the model learned; less makes prompts alike."""
    top_p: float = 0.95
    """Keep the smallest set of tokens whose mass reaches this."""
    max_tokens: Annotated[int, AnswerLength] = 192
    """Most tokens of a prompt; a longer one is left out."""
    seed: int = 0
    """Same seed, same prompts."""
    concurrency: int = 16
    """Prompts at once."""


@data.command
def draw_prompts(options: DrawOptions, *, json: Json = False, loading: TargetOptions = LOADING) -> int:
    """Let a chat model write prompts itself (Magpie). Run again to go on after a stop, or with a larger count.

    They are what the model was tuned on, not what your users ask: take your own prompts where you have them.
    """
    from forerun.training.data.drawn import DrawSettings, PromptDraw, UserTurn, read_words

    names = ("temperature", "top_p", "max_tokens", "seed", "concurrency")
    settings = DrawSettings(**{name: getattr(options, name) for name in names})
    UserTurn.of(session.load_tokenizer(options.target))
    began = time.monotonic()
    with console.progress_bar("drawing") as update:

        def tell(progress: PromptDraw) -> None:
            pace = (progress.kept - progress.resumed) / max(time.monotonic() - began, 1e-9)
            update(completed=progress.kept, total=options.count, description=f"drawing {pace:.1f} prompts/s")

        how: dict[str, Any] = {"count": options.count, "settings": settings, "held_out": read_words(options.avoid)}
        drawn = PromptDraw(output=options.output, tell=tell, **how)
        if drawn.kept < options.count:
            llm = session.load(options.target, loading, None, max_num_seqs=options.concurrency)
            began = time.monotonic()
            drawn.run(llm)
    if json:
        console.write_json(drawn.summary())
        return 0
    earlier = f", of which {drawn.resumed:,} were there already" if drawn.resumed else ""
    console.out().print(f"{drawn.output}: {drawn.kept:,} prompts{earlier}")
    if drawn.refused:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in drawn.refused.most_common())
        console.out().print(f"left out: {reasons}")
    return 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RegenerateOptions:
    """The options that say who writes the completions, how, and where they go."""

    output: Path
    """JSONL to append to; records that it holds are not written again, and with other settings they are refused."""
    target: str | None = None
    """Directory or hub id of the model that completes here. With --endpoint it only gives the tokenizer."""
    endpoint: str | None = None
    """URL of an OpenAI-compatible server that completes instead; OPENAI_API_KEY is sent if it is set."""
    model: str | None = None
    """The target's name at the endpoint."""
    concurrency: int | None = None
    """Records at once: 8 here, 32 at an endpoint."""
    max_tokens: Annotated[int, AnswerLength] = 1024
    """Most tokens of one completion."""
    temperature: Annotated[float | None, Parameter(alias="-t")] = None
    """0 is greedy; by default the model's or the server's own."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose mass reaches this."""
    seed: int | None = None
    """Same seed, same completions."""
    prompt_tokens: int = 64
    """Tokens of a plain text that are given; the target continues them."""
    chat_template_kwargs: TemplateVariables = None
    limit: int | None = None
    """Only the first records of the file."""
    skip_bad: SkipBad = False

    def __post_init__(self) -> None:
        refuse(
            (
                self.target is None and self.endpoint is None,
                "what shall complete the prompts? give --target MODEL, or --endpoint URL with --model NAME",
            ),
            ((self.endpoint is None) != (self.model is None), "--endpoint URL and --model NAME belong together"),
            (
                self.concurrency is not None and self.concurrency < 1,
                f"--concurrency must be at least 1, got {self.concurrency}",
            ),
        )


def _variables(given: str | None) -> dict[str, Any]:
    return json_object(given, "--chat-template-kwargs") if given else {}


@data.command
def regenerate(
    file: Path,
    /,
    *,
    options: RegenerateOptions,
    json: Json = False,
    speculation: SpeculationOptions = SPECULATION,
    loading: TargetOptions = LOADING,
) -> int:
    """Let the target write the completions itself. Run again to go on after a stop. Exit code 1 if a record failed.

    Parameters
    ----------
    file
        Conversations, prompts or plain texts, in any form that `forerun data prepare` reads.
    """
    from forerun.training.data.regenerate import AnswerRun, Director, Endpoint, with_endpoint, with_engine

    sampling = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    tokenizer = None if options.target is None else session.load_tokenizer(options.target)
    how: dict[str, Any] = {
        "params": SamplingParams(**sampling),
        "variables": _variables(options.chat_template_kwargs),
        "by": Path(options.model or str(options.target)).resolve().name,
        "weights": _weights(str(options.target), loading.adapter) if options.endpoint is None else "",
    }
    director = Director(tokenizer=tokenizer, prompt_tokens=options.prompt_tokens, **how)
    began = time.monotonic()
    with console.progress_bar("regenerating") as update:

        def tell(progress: AnswerRun) -> None:
            pace = progress.tokens / max(time.monotonic() - began, 1e-9)
            words = f"regenerating at {pace:,.0f} tokens/s" if progress.tokens else "regenerating"
            update(completed=progress.done, total=progress.total, description=words)

        todo = AnswerRun(file, options.output, director, limit=options.limit, skip_bad=options.skip_bad, tell=tell)
        tell(todo)
        if todo.unidentified:
            console.warn(
                f"{todo.unidentified:,} completions in {options.output} do not say of which weights and chat template "
                f"they are; those of a target named {director.by!r} count as this one's"
            )
        try:
            if options.endpoint is not None:
                server = Endpoint(url=options.endpoint, model=str(options.model))
                with_endpoint(todo, server, concurrency=options.concurrency or 32)
            elif todo.records:
                rows = options.concurrency or 8
                llm = session.load(str(options.target), loading, speculation.config(), max_num_seqs=rows)
                with_engine(todo, llm, concurrency=rows)
        except BaseException as error:
            safe = f"{todo.written:,} records are safe in {options.output}; the same command goes on from there"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"stopped: {safe}") from None
            if todo.written:
                console.warn(safe)
            raise
    _report(todo, as_json=json)
    return 1 if todo.failed else 0


def _weights(target: str, adapter: str | None) -> str:
    """Return a digest of what answers here: the target's weights, and those of its adapter."""
    from forerun.training.features.store import checkpoint_directory, target_hash
    from forerun.writing import hash_file, hash_json

    digest = target_hash(checkpoint_directory(target))[:16]
    if adapter is None:
        return digest
    files = sorted(Path(adapter).expanduser().glob("adapter_*"))
    return f"{digest}+{hash_json([hash_file(path) for path in files] or adapter)[:16]}"


def _report(run: AnswerRun, *, as_json: bool) -> None:
    for complaint in run.complaints:
        console.warn(f"left out: {complaint}")
    if as_json:
        console.write_json(run.summary())
        return
    earlier = f", {run.resumed:,} were there already" if run.resumed else ""
    written = f"{run.written:,} records written with {run.answers:,} completions"
    console.out().print(f"{run.output}: {written}{earlier}")
    if run.failed or run.skipped:
        console.out().print(f"{run.failed:,} records failed, {run.skipped:,} bad entries skipped")
