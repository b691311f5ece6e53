"""``forerun chat MODEL`` holds a conversation in the terminal, with speculation switched on and off
by a command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forerun.cli import Terminated, console, session
from forerun.cli.options import LOADING, SAMPLING, SPECULATION, Flag, SamplingOptions, SpeculationOptions, TargetOptions
from forerun.errors import NEAR, ArgumentError, ForerunError, nearest, refuse, refuse_unknown
from forerun.shipped import REAL
from forerun.types import SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM

HELP = """\
/help               this list
/reset              forget the conversation
/system TEXT        another system message, none without TEXT; the conversation stays
/temperature T      temperature of the next completions, 0 is greedy
/stats              counts of the whole session
/spec on|off        speculation for the next answers
/drafter NAME|PATH  draft with another drafter, draft model or head
/quit               leave (so does Ctrl-D; Ctrl-C stops a completion, or what a command does)"""


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
    """Talk to a model, with speculation if a drafter is named. /help lists the commands.

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
        session.print_legend(log)
    while (line := _ask()) is not None:
        try:
            if not talk.handle(line):
                break
        except ForerunError as error:
            console.report_error(str(error))
        except Terminated:
            raise
        except KeyboardInterrupt:
            log.print(Text("\nstopped; nothing of it is kept", "dim"))
    return 0


def _ask() -> str | None:
    """Return the next line, None at the end of input or after Ctrl-C twice."""
    log = console.log()
    for hint in ("\nCtrl-D or /quit leaves; so does Ctrl-C once more", ""):
        try:
            return log.input(Text("\n> ", "bold cyan")).strip()
        except EOFError:
            break
        except Terminated:
            raise
        except KeyboardInterrupt:
            log.print(Text(hint, "dim"))
    log.print()
    return None


class Conversation:
    """The messages so far, and what the slash commands change."""

    def __init__(
        self, llm: LLM, params: SamplingParams, config: dict[str, Any] | None, *, system: str | None, show_draft: bool
    ) -> None:
        self.llm, self.params, self.config, self.show_draft = llm, params, config, show_draft
        self.speculating = config is not None
        self.system = system
        self.messages = list[dict[str, str]]()  # Without the system message
        self.total = SpeculationStats()
        self.answers = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: console.log().print(HELP, markup=False),
            "/reset": self._reset,
            "/system": self._system,
            "/temperature": self._temperature,
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
        beginning = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self.messages, {"role": "user", "content": message}]
        speculative: Any = self.config if self.speculating else False
        chunks = self.llm.stream_chat([*beginning, *messages], self.params, speculative=speculative)
        output = session.print_stream(chunks, show_draft=self.show_draft)
        if output is None:
            return
        answer = output.outputs[0]
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.total.add(answer.speculation)
        self.answers += 1
        console.log().print(session.statistics_line(output))

    def _reset(self, _: str) -> None:
        self.messages = []
        console.log().print(Text("forgotten", "dim"))

    def _system(self, argument: str) -> None:
        self.system = argument or None
        console.log().print(Text("there is another system message" if argument else "no system message", "dim"))

    def _temperature(self, argument: str) -> None:
        try:
            self.params = replace(self.params, temperature=float(argument))
        except ValueError as error:  # Of float, or an ArgumentError about another number
            raise ArgumentError(f"/temperature takes a number, 0 for greedy, got {argument!r}") from error
        console.log().print(Text(session.describe_sampling(self.llm, self.params), "dim"))

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
        from forerun.control.config import SpeculativeConfig, method_of
        from forerun.drafters import entry_named, is_outside, methods

        if not argument:
            raise ArgumentError(
                f"/drafter takes a name ({', '.join(methods())}) or the directory or hub id of a draft model or a head"
            )
        is_method = argument in methods() or is_outside(argument)
        if not (is_method or "/" in argument or Path(argument).exists()) and nearest(argument, methods(), NEAR):
            entry_named(argument)  # Raises
        named = {"method": argument} if is_method else {"method": method_of(argument), "model": argument}
        self.llm.engine.drafting.ensure(SpeculativeConfig.parse(named))
        self.config = named
        self.speculating = True
        console.log().print(Text(f"drafting with {argument}", "dim"))
