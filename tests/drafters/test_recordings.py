"""All levels of a head's tree as one recording: nothing is read on the host, and a replay drafts what a run would.

A traced graph stands for the CUDA graph: like that it has the first call's course, shapes and addresses. The other
proof needs no graph: on the meta device there are no values to read.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from forerun import LLM, SamplingParams
from forerun.drafters.drawing import likeliest
from forerun.drafters.trees import DynamicTree
from forerun.heads.drafting import HeadDrafter
from forerun.heads.runner import SequentialRunner
from forerun.model import TransformersTarget
from forerun.model.recordings import Recordings, Work
from selection import slow
from training.ttt import head, hydra, mlp_speculator, model, tokens

CHAIN: dict[str, Any] = {"num_speculative_tokens": 4}
TREE: dict[str, Any] = {"shape": (3, 2, 1)}
DYNAMIC: dict[str, Any] = {"num_speculative_tokens": 4, "top_k": 3, "nodes": 9}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
FILTERED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 9},
    {"temperature": 1.0, "min_p": 0.05},
]
ASKED = [
    (TREE, [GREEDY, SAMPLED], {"kind": "hydra"}),
    *slow(
        (CHAIN, [GREEDY, *FILTERED], {}),
        (DYNAMIC, [GREEDY], {"sliding_window": 3}),
        (TREE, [GREEDY], {}),
        (TREE | {"draw": "greedy_k"}, [SAMPLED, GREEDY], {}),
        (DYNAMIC, [SAMPLED], {}),
        (DYNAMIC, [GREEDY], {"kind": "hydra", "num_hidden_layers": 0}),
        (CHAIN, [GREEDY, SAMPLED], {"kind": "mlp_speculator"}),
    ),
]
"""Trees, what requests ask for in turn, and the head: its kind, EAGLE-3 where nothing is said, and its options."""
MAKE: dict[str, Any] = {"eagle3": head, "hydra": hydra, "mlp_speculator": mlp_speculator}


def traced(work: Work, inputs: tuple[Tensor, ...]) -> Work:
    """Record by tracing: a value that is read on the host raises. Each replay gives the same object, overwritten."""
    own = tuple(tensor.clone() for tensor in inputs)
    made: list[Any] = []

    def flat(*given: Tensor) -> dict[str, Tensor]:
        made.append(work(*given))
        if made[-1] is None:  # it only writes
            return {}
        fields = {field.name: getattr(made[-1], field.name) for field in dataclasses.fields(made[-1])}
        return {name: value for name, value in fields.items() if isinstance(value, Tensor)}

    work(*own)  # what is allocated once is there
    graph = make_fx(flat)(*own)
    result = dataclasses.replace(made[0], **graph(*own)) if made[0] is not None else None

    def replay(*given: Tensor) -> Any:
        for name, value in graph(*given).items():
            getattr(result, name).copy_(value)
        return result

    return replay


def engine(options: dict[str, Any], recordings: Recordings, made: dict[str, Any]) -> tuple[LLM, list[Any]]:
    """An engine whose head, `made` so, records so, and all that it will have drafted."""
    options_of = dict(made)
    kind = options_of.pop("kind", "eagle3")
    config = {"method": kind, "model": MAKE[kind](**options_of), "adaptive": False, **options}
    llm = LLM(model(), tokenizer=False, speculative_config=config, self_check=False, max_num_seqs=3)
    llm.generate({"prompt_token_ids": tokens(3)}, SamplingParams(temperature=0, max_tokens=1, detokenize=False))
    (active,) = llm.engine.drafting._active.values()
    drafter = active.drafter.drafter
    assert isinstance(drafter, HeadDrafter)
    drafter.runner.recordings = recordings
    drafts: list[Any] = []
    propose = drafter.propose

    def watched(*given: Any) -> Any:
        trees = propose(*given)
        drafts.append([(list(tree.tokens), list(tree.parents)) for tree in trees])
        return trees

    drafter.propose = watched
    return llm, drafts


def answers(llm: LLM, asked: list[tuple[int, int]], settings: list[dict[str, Any]]) -> list[list[int]]:
    """To prompts of so many tokens, of so many tokens."""
    prompts = [{"prompt_token_ids": tokens(length, seed=length)} for length, _ in asked]
    params = [
        SamplingParams(max_tokens=count, detokenize=False, seed=place, **settings[place % len(settings)])
        for place, (_, count) in enumerate(asked)
    ]
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]


@pytest.mark.parametrize(("options", "settings", "made"), ASKED, ids=str)
def test_a_replay_drafts_what_a_run_would(
    options: dict[str, Any], settings: list[dict[str, Any]], made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come and go, grow past the first width and lie scattered: the same drafts, from few recordings."""
    monkeypatch.setattr("forerun.model.recordings.LEAST_WIDTH", 32)
    found = []
    recordings = Recordings(traced)
    for how in (Recordings(None), recordings):
        llm, drafts = engine(options, how, made)
        texts = [
            answers(llm, [(4, 40)], settings),
            answers(llm, [(5, 34), (40, 6), (9, 20), (3, 8), (12, 14)], settings),
        ]
        found.append((texts, drafts))
    assert found[0] == found[1]
    assert sum(len(tokens) - 1 for trees in found[0][1] for tokens, _ in trees) > 60
    assert 3 <= len(recordings) < len(found[0][1]) / 2


def test_what_reads_on_the_host_is_not_recorded() -> None:
    recordings = Recordings(traced)
    llm, drafts = engine({"num_speculative_tokens": 3, "top_k": 3, "stop_below": 0.2}, recordings, {})
    llm.generate({"prompt_token_ids": tokens(6)}, SamplingParams(temperature=0, max_tokens=12, detokenize=False))
    assert drafts and {key[0] for key in recordings._known} == {"committed"}
    assert not SequentialRunner(
        head(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), TransformersTarget(model(), rows=1, slots=8), 1, 8
    ).recordings.active


def test_where_recording_fails_drafts_are_those_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """After some recordings, in the middle of a request: no draft is lost, and it is said once."""
    tries = list[int]()

    def failing(work: Work, inputs: tuple[Tensor, ...]) -> Work:
        tries.append(len(tries))
        if len(tries) > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return traced(work, inputs)

    found = []
    recordings = Recordings(failing)
    for how in (Recordings(None), recordings):
        llm, drafts = engine({"num_speculative_tokens": 3}, how, {})
        found.append((answers(llm, [(5, 20), (40, 8), (9, 12)], [GREEDY]), drafts))
    assert found[0] == found[1] and not recordings.active and len(tries) == 2
    assert [record.message for record in caplog.records if "goes on without" in record.message] == [
        "recording on the device failed, work goes on without, which is slower: "
        "RuntimeError('operation not permitted when stream is capturing')"
    ]


def test_the_recording_used_least_lately_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.model.recordings._MOST", 2)
    recorded = list[int]()

    def record(work: Work, inputs: tuple[Tensor, ...]) -> Work:
        recorded.append(int(inputs[0]))
        return work

    recordings = Recordings(record)
    for key in (1, 2, 1, 3, 1, 2):
        assert int(recordings.run(key, lambda value: value + 1, torch.tensor(key))) == key + 1
    assert recorded == [1, 2, 3, 2]


@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": 40}, {"num_hidden_layers": 2, "sliding_window": 3, "full_layers": (1,)}],
    ids=str,
)
def test_no_level_needs_a_value(options: dict[str, Any]) -> None:
    """On the meta device, and with rows that do not follow each other."""
    made = head(own_embedding=True, **options).to("meta")
    runner = SequentialRunner(made, TransformersTarget(model(), rows=1, slots=8), rows=4, slots=64)
    tree = DynamicTree(depth=4, top_k=3, nodes=9)
    best = runner.unroll([0, 2], tree.run, lambda logits: tree.grow(logits, runner.descend, None, 4))
    assert best.order.shape == (2, 9) and best.order.device.type == "meta"

    def chain(logits: Tensor) -> Tensor:
        for _ in range(3):
            children = likeliest(logits, 1)
            logits = runner.descend(children.tokens.flatten(1), torch.zeros(2, 1, dtype=torch.int64, device="meta"))
        return logits

    assert runner.unroll([0, 2], 3, chain).shape == (2, 1, made.config.draft_vocab_size)
