"""Linear attention with decay: gated delta rule, KDA, Mamba-2, lightning attention and mLSTM, whose state is a matrix
from keys to values.

Within a pass it is attention: a node reads the nodes before it on its path, each decayed by the path between them, and
behind them the committed state. This is the form in which these models run over a chunk of a prompt (Gated Delta
Networks, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692; Mamba-2, arXiv 2405.21060), with the tree's paths in place of
the order of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.model.states.rows import Fed, Recurrence, StatePass, Tree


@dataclass
class LinearAttention(Recurrence):
    """A state (rows, H, K, V) that each token decays, and to which it adds its key times its value.

    `inputs` are queries and keys (B, N, H, K), values (B, N, H, V) and logarithms of the decay (B, N, H, 1 or K); a
    delta rule has a fifth, (B, N, H): how much of what the state says of the key its value replaces.
    """

    inputs: Fed

    def fresh(self, rows: int) -> Tensor:
        _, keys, values, *_ = self.inputs
        return values.new_zeros(rows, values.shape[2], keys.shape[3], values.shape[3])

    def run(self, state: Tensor, inputs: Fed, earlier: Fed | None, tree: Tree) -> tuple[Tensor, Fed]:
        queries, keys, values, decay = (part.transpose(1, 2) for part in inputs[:4])
        written: Tensor | None = None  # (B, H, M - N, V) what earlier nodes write
        if earlier is not None:
            before, written, decayed = (part.transpose(1, 2) for part in earlier)
            keys, decay = torch.cat([before, keys], dim=2), torch.cat([decayed, decay], dim=2)
        start = tree.start
        sees = tree.sees.unsqueeze(1)
        total = sees.to(decay.dtype) @ decay  # (B, H, M, 1 or K) up to each node
        fresh, here = total[:, :, start:].exp(), keys[:, :, start:]
        weights = _decays(total, sees, start)

        def read(what: Tensor) -> Tensor:
            """Compare (B, H, N, K) with the keys that each fresh node sees: (B, H, N, M)."""
            if weights.dim() == 4:
                return (what @ keys.transpose(2, 3)) * weights
            return torch.einsum("bhnk,bhmk,bhnmk->bhnm", what, keys, weights)

        if len(inputs) == 5:
            share = inputs[4].transpose(1, 2).unsqueeze(3)
            system = read(here * share)
            values = values * share - (here * share * fresh) @ state
            if written is not None:
                values = values - system[..., :start] @ written
            values = torch.linalg.solve_triangular(system[..., start:], values, upper=False, unitriangular=True)
        if written is not None:
            values = torch.cat([written, values], dim=2)
        outputs = (queries * fresh) @ state + read(queries) @ values
        return outputs.transpose(1, 2), (keys.transpose(1, 2), values.transpose(1, 2), decay.transpose(1, 2))

    @staticmethod
    def advance(state: Tensor, fed: Fed, tree: Tree) -> Tensor:
        keys, values, decay = (part.transpose(1, 2) for part in fed)
        reached = tree.reached.to(decay.dtype).view(len(state), 1, -1, 1)
        total = tree.sees.unsqueeze(1).to(decay.dtype) @ decay
        whole = (decay * reached).sum(2, keepdim=True)  # (B, H, 1, 1 or K)
        left = ((whole - total).clamp(max=0).exp() * reached * keys).transpose(2, 3)
        return state * whole.transpose(2, 3).exp() + left @ values


def _decays(total: Tensor, sees: Tensor, start: int) -> Tensor:
    """Return what is left at each fresh node of what each node wrote: (B, H, N, M), or (B, H, N, M, K)."""
    visible = sees[:, :, start:]
    if total.shape[3] == 1:
        between = total[:, :, start:] - total.transpose(2, 3)
        return between.masked_fill(~visible, float("-inf")).exp()
    between = total[:, :, start:].unsqueeze(3) - total.unsqueeze(2)
    return between.masked_fill(~visible.unsqueeze(4), float("-inf")).exp()


def _of_length_one(values: Tensor) -> Tensor:
    """Normalise as the fla kernels do: ``x / sqrt(sum(x * x) + 1e-6)``."""
    return values * torch.rsqrt((values * values).sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    this: StatePass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run `torch_chunk_gated_delta_rule` or `chunk_kimi_delta_attention`: (B, N, H, V)."""
    queries, keys, values, decay, share = (part.float() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        queries, keys = _of_length_one(queries), _of_length_one(keys)
    queries = queries * queries.shape[-1] ** -0.5
    if keys.shape[2] != values.shape[2]:
        times = values.shape[2] // keys.shape[2]
        queries, keys = (part.repeat_interleave(times, dim=2) for part in (queries, keys))
    if decay.dim() == 3:
        decay = decay.unsqueeze(3)
    outputs = this.run(LinearAttention((queries, keys, values, decay, share)))
    return outputs.to(query.dtype), outputs


def scan_heads(
    this: StatePass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run `mamba2_chunk_scan`: (B, N, H, P)."""
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit).float()
    values = hidden_states.float()
    times = hidden_states.shape[2] // B.shape[2]
    keys, queries = (part.float().repeat_interleave(times, dim=2) for part in (B, C))
    outputs = this.run(LinearAttention((queries, keys, values * steps.unsqueeze(3), (A * steps).unsqueeze(3))))
    if D is not None:
        outputs = outputs + values * D.unsqueeze(-1)
    return outputs.contiguous(), outputs


def lightning(this: StatePass, module: Any, hidden_states: Tensor, **_kwargs: Any) -> tuple[Tensor, None]:
    """Run lightning attention (arXiv 2501.08313), whose decay is a constant of each head."""
    states = module.act_fn(module.qkv_proj(hidden_states)).unflatten(2, (module.num_attention_heads, -1))
    queries, keys, values = states.float().chunk(3, dim=3)
    decay = -module.slope_rate.float().view(-1, 1).expand(*keys.shape[:3], 1)
    found = this.run(LinearAttention((queries, keys, values, decay))).to(hidden_states.dtype)
    gate = torch.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(found.flatten(2))), None


def exponential_gates(
    this: StatePass,
    module: Any,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Run mLSTM (xLSTM, arXiv 2405.04517) on (B, H, N, ..). A last value of 1 sums the weights that it divides by; the
    exponents are soft-capped, so nothing has to be scaled down by the largest of them.
    """
    queries, keys, values = (part.float().transpose(1, 2) for part in (query, key, value))
    strength, decay = (part.float().transpose(1, 2).unsqueeze(3) for part in (igate, fgate))
    values = torch.cat([values, torch.ones_like(values[..., :1])], dim=3)
    keys, queries = keys * strength.exp(), queries * queries.shape[-1] ** -0.5
    outputs = this.run(LinearAttention((queries, keys, values, functional.logsigmoid(decay))))
    outputs = outputs[..., :-1] / (outputs[..., -1:].abs().clamp(min=1) + module.config.eps)
    return outputs.transpose(1, 2).to(query.dtype), None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": scan_heads,
}
FORWARDS: dict[str, Callable[..., Any]] = {"set_linear_cache": lightning, "igate": exponential_gates}
