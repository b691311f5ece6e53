"""forerun's lookup drafters run inside SGLang with ``--speculative-algorithm FORERUN``.

SGLang finds `register` through the entry point ``sglang.srt.plugins`` wherever forerun is installed
beside it. ``FORERUN_SGLANG_CONFIG`` configures the drafter: JSON, or a file with it. The algorithm
is SGLang's own ``NGRAM`` in all but who drafts (`sglang_worker`): trees are verified whole. The
interface is that of ``speculative/spec_registry.py`` of the wheel 0.5.23.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from forerun.deploy.engines.sglang import ALGORITHM, PLUGGED_NODES, VARIABLE
from forerun.deploy.sequences import read_fixed_config
from forerun.errors import ArgumentError, refuse

ROWS = 48
"""At most this many requests run where ``--max-running-requests`` does not say, as with SGLang's
``NGRAM``.
"""


def register() -> None:
    """Register the algorithm; SGLang calls this when it loads its plug-ins."""
    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=ForerunAlgorithm)(_worker)


def _worker(_: Any) -> type:
    from forerun.deploy.sglang_worker import ForerunWorker

    return ForerunWorker


class ForerunAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """SGLang's ``NGRAM`` under another name."""

    def is_ngram(self) -> bool:
        """Return True: the drafts are trees of copied tokens, which the scheduler, the relay and
        the graphs treat as NGRAM's.
        """
        return True

    def has_draft_kv(self) -> bool:
        """Return False: only the target keeps keys and values."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in the server arguments that were left open.

        ArgumentError: the server is set up so that drafts would be wrong, or the configuration
        names no drafter that can draft here.
        """
        server_args.max_running_requests = server_args.max_running_requests or ROWS
        server_args.enable_mixed_chunk = False
        nodes = server_args.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens or PLUGGED_NODES
        if nodes < 2:
            raise ArgumentError(
                f"--speculative-num-draft-tokens counts the root: {nodes} drafts nothing; give 2 or more"
            )
        read_fixed_config(VARIABLE, nodes - 1)
        width = server_args.speculative_eagle_topk = server_args.speculative_eagle_topk or PLUGGED_NODES
        server_args.speculative_num_steps = nodes - 1
        refuse(
            (
                width > 1 and (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer",
                f"SGLang's attention verifies trees on pages of one token, or with flashinfer; pages have "
                f"{server_args.page_size} here. Give --speculative-eagle-topk 1 (chains), or --page-size 1",
            ),
            (
                getattr(server_args, "enable_dp_attention", False),
                f"SGLang's NGRAM, and {ALGORITHM} with it, does not run with --enable-dp-attention",
            ),
        )
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True

    def __getattr__(self, name: str) -> Any:
        """Return what the scheduler asks of its own algorithms, but the base class for others lacks
        in 0.5.23.
        """
        if name.startswith("_"):  # copying and pickling ask for these: a copy would be NGRAM
            raise AttributeError(name)
        return getattr(SpeculativeAlgorithm.NGRAM, name)
