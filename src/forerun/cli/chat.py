"""``forerun chat MODEL`` holds a conversation in the terminal, with speculation switched on and off
by a command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forerun.cli import console, session
from forerun.cli.options import LOADING, SAMPLING, SPECULATION, Flag, SamplingOptions, SpeculationOptions, TargetOptions
from forerun.errors import ArgumentError, ForerunError, refuse, refuse_unknown
from forerun.shipped import REAL
from forerun.types import SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM

HELP = """\
/help               this list
/reset              forget the conversation
/stats              counts of the whole session
/spec on|off        speculation for the next answers
/drafter NAME|PATH  draft with another drafter, or another draft model
/quit               leave (so does Ctrl-D; Ctrl-C stops a completion)"""


def chat(
    model: str = REAL,
    /,
    *,
    system: str | None = None,
    show_draft: Flag = False,
    speculation: SpeculationOptions = SPECULATION,
    sampling: SamplingOptions = SAMPLING,
    loading: TargetOptions = LOADING,
) -> int:
    """Talk to a model. /help lists the commands.

    Parameters
    ----------
    model
        Directory or hub id of a Hugging Face causal LM with a chat template, or a GGUF file; `smollm2` is a small one
        that is downloaded once.
    system
        A system message to begin with.
    show_draft
        Colour every token by its source.
    """
    config = speculation.config()
    params = sampling.params()
    llm = session.load(model, loading, config, announce=True, max_num_seqs=1)
    talk = Conversation(llm, params, config, system=system, show_draft=show_draft)
    log = console.log()
    log.print(Text(session.describe_sampling(llm, params), "dim"))
    log.print(Text(f"{model}: type a message; /help lists the commands", "dim"))
    if show_draft:
        log.print(session.legend(log))
    while (line := _ask()) is not None:
        try:
            if not talk.handle(line):
                break
        except ForerunError as error:
            console.report_error(str(error))
    return 0


def _ask() -> str | None:
    """Return the next line, None at the end of input. Ctrl-C at the prompt leaves, too."""
    try:
        return console.log().input(Text("\n> ", "bold cyan")).strip()
    except (EOFError, KeyboardInterrupt):
        console.log().print()
        return None


class Conversation:
    """The messages so far, and what the slash commands change."""

    def __init__(
        self, llm: LLM, params: SamplingParams, config: dict[str, Any] | None, *, system: str | None, show_draft: bool
    ) -> None:
        self.llm, self.params, self.config, self.show_draft = llm, params, config, show_draft
        self.speculating = config is not None
        self.beginning = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.beginning)
        self.total = SpeculationStats()
        self.answers = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: console.log().print(HELP, markup=False),
            "/reset": self._reset,
            "/stats": self._stats,
            "/spec": self._spec,
            "/drafter": self._drafter,
        }

    def handle(self, line: str) -> bool:
        """Handle one line of the user, a command or a message; return False to end the
        conversation.
        """
        command, _, argument = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if not line.startswith("/"):
            if line:
                self._answer(line)
            return True
        refuse_unknown("unknown command", command, [*self._commands, "/quit"])
        self._commands[command](argument.strip())
        return True

    def _answer(self, message: str) -> None:
        messages = [*self.messages, {"role": "user", "content": message}]
        speculative: Any = self.config if self.speculating else False
        chunks = self.llm.stream_chat(messages, self.params, speculative=speculative)
        try:
            output = session.print_stream(chunks, show_draft=self.show_draft)
        except KeyboardInterrupt:
            console.log().print(Text("\nstopped; the completion is forgotten", "dim"))
            return
        if output is None:
            return
        answer = output.outputs[0]
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.total.add(answer.speculation)
        self.answers += 1
        console.log().print(session.statistics_line(output))

    def _reset(self, _: str) -> None:
        self.messages = list(self.beginning)
        console.log().print(Text("forgotten", "dim"))

    def _stats(self, _: str) -> None:
        total = self.total
        depths = "  ".join(f"{share:.0%}" for share in total.acceptance_per_depth) or "-"
        noun = "completion" if self.answers == 1 else "completions"
        console.log().print(
            f"{self.answers} {noun}, {total.num_tokens} tokens, {total.tokens_per_pass:.2f} tokens per pass\n"
            f"{total.num_passes} passes, {total.num_spec_steps} of them with a draft\n"
            f"{total.num_accepted_draft_tokens} of {total.num_draft_tokens} drafted tokens accepted, "
            f"mean acceptance length {total.mean_acceptance_length:.2f}\n"
            f"accepted by depth: {depths}",
            markup=False,
        )

    def _spec(self, argument: str) -> None:
        refuse(
            (argument not in ("on", "off"), f"/spec takes on or off, got {argument!r}"),
            (argument == "on" and self.config is None, "no drafter yet; name one with /drafter"),
        )
        self.speculating = argument == "on"
        console.log().print(Text(f"speculation {argument}", "dim"))

    def _drafter(self, argument: str) -> None:
        from forerun import SpeculativeConfig
        from forerun.drafters import is_outside, methods

        if not argument:
            raise ArgumentError(
                f"/drafter takes a name ({', '.join(methods())}) or a draft model's directory or hub id"
            )
        is_method = argument in methods() or is_outside(argument)
        named = {"method": argument} if is_method else {"method": "draft_model", "model": argument}
        self.llm.engine.drafting.ensure(SpeculativeConfig.parse(named))
        self.config = named
        self.speculating = True
        console.log().print(Text(f"drafting with {argument}", "dim"))
