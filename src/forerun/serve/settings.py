"""These are the settings of a server: keys, origins, limits and logs. Imports no web framework and
no torch.

These are options of ``forerun serve``, too: a field here is a flag there, and its default is written nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from forerun.drafters import entry_named
from forerun.errors import refuse, refuse_below
from forerun.option_groups import ACCESS, API, CAPACITY, LOGS, NETWORK
from forerun.serve.reasoning import find_marks
from forerun.serve.tools.formats import check_parser


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """The settings of one server."""

    max_queue: Annotated[int, CAPACITY] = 256
    """Completions that wait or run at once; more are told to come back (429). A quarter is kept for requests of one."""
    max_n: Annotated[int, CAPACITY] = 16
    """Most completions of one prompt."""
    max_tokens: Annotated[int | None, CAPACITY] = None
    """Most tokens of one completion; as many as the context holds if not given."""
    max_body_bytes: Annotated[int, CAPACITY] = 4_000_000
    """Largest request body, bytes."""
    max_connections: Annotated[int, CAPACITY] = 1024
    """Open connections; more are told to come back (503)."""
    max_arriving: Annotated[int, CAPACITY] = 64
    """Requests of one address that may be arriving, or connections that it may leave idle, with all the time there is;
    further ones have a second."""
    stream_buffer: Annotated[int, CAPACITY] = 256
    """Chunks of a completion kept for a client that does not read; one more, and its request is dropped."""
    request_timeout_s: Annotated[float | None, Parameter(name="--request-timeout"), CAPACITY] = None
    """Seconds from queueing to the end of a completion, unless a request sets less; none if not given."""
    step_timeout_s: Annotated[float, CAPACITY] = 60.0
    """Seconds that one step of the engine may take; longer, and /health says 503 until it ends."""
    model_names: Annotated[tuple[str, ...], Parameter(name="--served-model-name"), API] = ()
    """Names that clients call the model; responses have the first, and ``/v1/models`` lists them. Requests may
    always call it by its path or hub id as given, and by the name of its directory or GGUF file, too.
    """
    tool_call_parser: Annotated[str, API] = "auto"
    """How the model writes tool calls: hermes, qwen3_coder, glm45, mistral, deepseek_v3, llama3_json, auto or none."""
    reasoning_parser: Annotated[str, API] = "auto"
    """How the model marks reasoning: qwen3, deepseek_r1, mistral, seed_oss, '<OPEN> <CLOSE>' marks,
    auto or none.
    """
    logprobs_mode: Annotated[Literal["raw_logprobs", "processed_logprobs"], API] = "raw_logprobs"
    """Log-probabilities of completions, unless a request says which: the model's own, or those sampled from."""
    client_drafters: Annotated[tuple[str, ...], API] = ("auto", "ngram")
    """Drafters that a request may choose besides the server's own; such as need no files."""
    max_speculative_tokens: Annotated[int, API] = 16
    """Tokens to draft per step that a request may have at most; of the server's own drafter no more than it has."""
    allow_traces: Annotated[bool, Parameter(negative=""), API] = False
    """Let requests use ``return_speculation_trace``, as the playground's do: what was drafted and rejected."""
    enable_prompt_tokens_details: Annotated[bool, Parameter(negative=""), API] = False
    """Report in ``usage`` how many prompt tokens were cached."""
    api_keys: Annotated[tuple[str, ...], Parameter(name="--api-key", env_var="FORERUN_API_KEY"), ACCESS] = ()
    """Keys, one of which clients must send. None: open to everybody who reaches the port."""
    share_unnamed: Annotated[bool, Parameter(negative=""), ACCESS] = False
    """Treat all requests without a key as one user's: they share cached prefixes and what drafters have learned, and
    can find out each other's text by that. Without it each of them is on its own."""
    admin_api_key: Annotated[str | None, Parameter(env_var="FORERUN_ADMIN_API_KEY"), ACCESS] = None
    """Key of the operator, who may load another head or draft model by it (``POST /v1/load_drafter``); nobody may
    without. It is accepted for no other request."""
    allow_weight_updates: Annotated[bool, Parameter(negative=""), ACCESS] = False
    """Let the operator's key change the model's weights (``POST /update_weights_from_disk``), and put the server to
    sleep and wake it up, as a trainer does that takes its rollouts from here."""
    allowed_origins: Annotated[tuple[str, ...], ACCESS] = ()
    """Origins of web pages that may call the API from a browser (CORS); ``*`` allows all."""
    receive_timeout_s: Annotated[float, NETWORK] = 30.0
    """Seconds in which a request must have arrived, headers and body."""
    send_timeout_s: Annotated[float, NETWORK] = 30.0
    """Seconds that a client may leave what it was sent unread; then the connection is cut."""
    drain_s: Annotated[float, NETWORK] = 60.0
    """Seconds that running requests may take after SIGTERM; a second later the process is gone."""
    root_path: Annotated[str, NETWORK] = ""
    """Path under which a proxy offers the server, such as ``/llm``; it may send it along or take it away."""
    ssl_certfile: Annotated[str | None, NETWORK] = None
    """PEM file with the server's certificate; with it the server speaks HTTPS alone."""
    ssl_keyfile: Annotated[str | None, NETWORK] = None
    """PEM file with the certificate's key, unless the first file has it, too."""
    ssl_ca_certs: Annotated[str | None, NETWORK] = None
    """PEM file with the certificates that those of clients are checked against; with it clients need one."""
    log_format: Annotated[Literal["text", "json"], LOGS] = "text"
    """Lines of ``key=value``, or one JSON object a line."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LOGS] = "info"
    """Least important lines to write."""
    log_clients: Annotated[bool, Parameter(negative=""), LOGS] = False
    """Write the client's address, too."""
    log_prompts: Annotated[bool, Parameter(negative=""), LOGS] = False
    """Write prompts and the messages of unexpected errors, which may quote them."""
    record_traffic: Annotated[Path | None, LOGS] = None
    """Directory to record conversations in, to train on: one file a key, deleted by ``forerun data delete-traffic``."""
    record_traffic_bytes: Annotated[int, LOGS] = 256_000_000
    """Largest file of a key; the oldest conversations make room for new ones."""

    @property
    def model_name(self) -> str:
        """Return the model's name in responses."""
        return self.model_names[0] if self.model_names else ""

    def queue_for(self, answers: int) -> int:
        """Return how many completions may wait or run where a request has this many: a part is left
        to single ones.
        """
        return self.max_queue if answers == 1 else self.max_queue - self.max_queue // 4

    @property
    def most_answers(self) -> int:
        """Return the most completions of one request.

        With several keys none may hold more of the queue than it leaves free.
        """
        return max(1, self.queue_for(2) // (2 if len(self.api_keys) > 1 else 1))

    def __post_init__(self) -> None:
        counts = (
            *("max_body_bytes", "max_queue", "max_n", "max_speculative_tokens", "max_tokens", "max_arriving"),
            *("stream_buffer", "max_connections", "record_traffic_bytes"),
        )
        times = ("receive_timeout_s", "send_timeout_s", "drain_s", "step_timeout_s")
        refuse_below("--", self, **dict.fromkeys(counts, 1), **dict.fromkeys(times, 0))
        for name in self.client_drafters:
            entry_named(name)
        check_parser(self.tool_call_parser)
        find_marks(self.reasoning_parser, template="")
        refuse(
            (
                self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs),
                "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile",
            ),
            (
                self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")),
                f"--root-path begins with a slash and does not end with one, got {self.root_path!r}",
            ),
            (
                self.request_timeout_s is not None and self.request_timeout_s <= 0,
                f"--request-timeout must be above 0, got {self.request_timeout_s}",
            ),
            (any(not key for key in self.api_keys), "an API key must not be empty"),
            (
                self.admin_api_key == "" or self.admin_api_key in self.api_keys,
                "--admin-api-key is a key of its own: not empty, and none of --api-key",
            ),
            (
                self.allow_weight_updates and self.admin_api_key is None,
                "--allow-weight-updates needs --admin-api-key: whoever has that key decides what the model says",
            ),
            (
                self.record_traffic is not None and not (self.api_keys or self.share_unnamed),
                "--record-traffic keeps apart what different users say, and requests without a key name no user: give "
                "--api-key, or --share-unnamed if all requests are yours",
            ),
        )
