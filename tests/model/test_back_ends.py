"""What every back end of a target has to do: the same model as transformers runs it and as llama.cpp runs it, through
one interface. A third back end is added to `BACK_ENDS` and passes this file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, CheckpointError, ForerunError, OutOfMemoryError, UnsupportedModelError
from forerun.model import Target, TransformersTarget, llama_context, llama_cpp
from forerun.model.back_ends import file_for_llama_cpp, load_target
from forerun.model.inputs import Nodes
from forerun.model.kernels import products
from forerun.model.self_check import divergence
from forerun.types import Drawn
from model.ggufs import TOKENS, needs_llama_cpp, tiny, write_tiny, write_tiny_hybrid
from model.soak import soak

NEAR = 2e-4  # Mean divergence, nats, that float16 keys and values explain; a sibling seen has 1e-2 and more
ROWS, SLOTS = 4, 160
HYBRID = "llama.cpp, a hybrid"  # Chains only
BACK_ENDS = ["transformers", *(pytest.param(name, marks=needs_llama_cpp) for name in ("llama.cpp", HYBRID))]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights whose next token depends on the whole text."""
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model=tiny(initializer_range=0.4))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LFM2 of short convolutions and attention."""
    return write_tiny_hybrid(tmp_path_factory.mktemp("gguf") / "hybrid.gguf")


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=BACK_ENDS)
def target(request: pytest.FixtureRequest, file: Path, hybrid: Path) -> Target:
    return opened(hybrid, "llama.cpp") if request.param == HYBRID else opened(file, request.param)


def opened(file: Path, backend: str, *, rows: int = ROWS, slots: int = SLOTS, **more: Any) -> Target:
    exact = {"dtype": "float32"} if backend == "transformers" else {}
    return load_target(file, backend=backend, rows=rows, slots=slots, device="cpu", **exact, **more)


def backend_of(target: Target) -> str:
    return "transformers" if isinstance(target, TransformersTarget) else "llama.cpp"


def text(seed: int, count: int) -> list[int]:
    return [random.Random(f"{seed} {index}").randrange(3, len(TOKENS)) for index in range(count)]


def tree(seed: int, nodes: int, *, chain: bool = False) -> TokenTree:
    """A tree whose tokens and shape follow from the seed."""
    rng, made = random.Random(seed), TokenTree(text(seed, 1)[0])
    for node in range(nodes):
        made.add(rng.randrange(3, len(TOKENS)), node if chain else rng.randrange(node + 1), drawn=Drawn.IID)
    return made


def path_to(made: TokenTree, node: int) -> tuple[int, ...]:
    found = list[int]()
    while node:
        found.append(node)
        node = made.parents[node]
    return tuple(reversed(found))


class Texts:
    """What the rows of a target should hold, and the logits that a fresh row gives."""

    def __init__(self, target: Target) -> None:
        self.target, self.held = target, [list[int]() for _ in range(target.rows - 1)]
        self.own = target.rows - 1  # The row in which everything is computed anew, in one chunk

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(N, V) after each token."""
        self.target.truncate([self.own], [0])
        found = self.target.prefill([self.own], [tokens], all_logits=True).logits[0]
        self.target.truncate([self.own], [0])
        return found

    def check(self, ours: Tensor, row: int, made: TokenTree) -> None:
        """Compare the logits (N, V) of a row's tree with those of its paths."""
        length = len(self.held[row])
        for leaf in set(range(made.size + 1)) - set(made.parents[1:]):
            path = (0, *path_to(made, leaf))
            expected = self.logits([*self.held[row], *(made.tokens[node] for node in path)])[length:]
            assert float(divergence(ours[list(path)], expected).mean()) < NEAR

    def commit(self, row: int, made: TokenTree, path: Sequence[int]) -> None:
        self.held[row] += [made.tokens[0], *(made.tokens[node] for node in path)]


def test_a_prompt_in_pieces_is_the_whole_prompt(target: Target) -> None:
    texts, prompts = Texts(target), [text(1, 40), text(2, 23)]
    first = target.prefill([0, 2], [prompts[0][:17], prompts[1][:5]]).logits
    last = target.prefill([0, 2], [prompts[0][17:], prompts[1][5:]]).logits
    assert first.shape == last.shape == (2, 1, target.vocab_size)
    assert target.lengths[0] == 40 and target.lengths[2] == 23
    for row, prompt in enumerate(prompts):
        assert float(divergence(last[row, 0], texts.logits(prompt)[-1])) < NEAR


def test_all_logits_of_unequal_prompts_are_left_aligned(target: Target) -> None:
    found = target.prefill([1, 0], [text(1, 9), text(2, 4)], all_logits=True).logits
    assert found.shape == (2, 9, target.vocab_size)
    assert float(divergence(found[1, :4], Texts(target).logits(text(2, 4))).mean()) < NEAR


class Doings:
    """What may be done with rows, at random."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.rng, self.texts = target, random.Random(seed), Texts(target)

    def prefill(self, rows: list[int]) -> None:
        chunks = [text(self.rng.randrange(1000), self.rng.randint(1, 9)) for _ in rows]
        self.target.prefill(rows, chunks)
        for row, chunk in zip(rows, chunks, strict=True):
            self.texts.held[row] += chunk

    def cut(self, rows: list[int]) -> None:
        lengths = [self.target.reusable(row, self.rng.randint(1, len(self.texts.held[row]))) for row in rows]
        self.target.truncate(rows, lengths)
        for row, length in zip(rows, lengths, strict=True):
            del self.texts.held[row][length:]

    def copy(self, rows: list[int]) -> None:
        source, other = rows[0], self.rng.choice([row for row in range(ROWS - 1) if row != rows[0]])
        length = self.target.reusable(source, self.rng.randint(0, len(self.texts.held[source])))
        if self.rng.random() < 0.5:
            length = len(self.texts.held[source])
        self.target.truncate([other], [0])
        self.target.copy_row(source, other, length)
        self.texts.held[other] = self.texts.held[source][:length]

    def prefix(self, rows: list[int]) -> None:
        """A row is freed, and its beginning is wanted again."""
        row, length, writes = rows[0], 0, self.target.writes[rows[0]]
        self.target.truncate([row], [0])
        if self.target.writes[row] == writes:
            most = len(self.texts.held[row])
            length = self.target.reusable(row, self.rng.choice([self.rng.randint(0, most), most]))
            self.target.restore(row, length)
            self.target.clear(row)
        self.texts.held[row] = self.texts.held[row][:length]

    def score(self, rows: list[int]) -> None:
        only = self.target.chains_only
        made = [
            tree(self.rng.randrange(1000), self.rng.randint(0, 11), chain=only or self.rng.random() < 0.3) for _ in rows
        ]
        if self.rng.random() < 0.2:  # A step that is scored again, as one with a row that failed
            self.target.score(rows, [tree(3, 5, chain=only) for _ in rows])
        logits = self.target.score(rows, made).logits
        paths = [path_to(one, self.rng.randrange(one.size + 1)) for one in made]
        self.target.commit(rows, paths)
        for index, row in enumerate(rows):
            self.texts.check(logits[index, : made[index].size + 1], row, made[index])
            self.texts.commit(row, made[index], paths[index])


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_with_rows_they_hold_what_they_should(target: Target, seed: int) -> None:
    """Prompts, trees of all shapes, kept paths, cuts, copies, prefixes that come back, against texts that are computed
    anew."""
    doings = Doings(target, seed)
    for _ in range(25):
        rows, held = sorted(doings.rng.sample(range(ROWS - 1), doings.rng.randint(1, ROWS - 1))), doings.texts.held
        names = ["prefill", "score", "score", "score", "cut", "copy", "prefix"]
        getattr(doings, doings.rng.choice(names) if all(held[row] for row in rows) else "prefill")(rows)
        assert [target.lengths[row] for row in range(ROWS - 1)] == [len(one) for one in held]
        if max(map(len, held)) > SLOTS - 40:
            target.truncate(range(ROWS - 1), [0] * (ROWS - 1))
            doings.texts.held = [[] for _ in held]


def test_a_tree_grows_level_by_level(target: Target) -> None:
    """As a draft model grows it: the nodes before `start` were run by the calls before."""
    texts, rows = Texts(target), [0, 2]
    for row in rows:
        target.prefill([row], [text(row, 12 + row)])
        texts.held[row] = text(row, 12 + row)
    parents, roots = [-1, 0, 0, 0, 1, 1, 2, 3, 4, 6, 6], [5, 9]
    paths = [(2, 6, 10), (1, 5)]
    if target.chains_only:
        parents, paths = list(range(-1, 10)), [(1, 2, 3), ()]
    ids = torch.tensor([text(40 + row, len(parents) - 1) for row in rows])
    found = [target.score(rows, Nodes.of_levels(roots, ids[:, :0], parents, counts=[10, 10], start=0)).logits]
    for start, end in ((1, 4), (4, 8), (8, 11)):
        nodes = Nodes.of_levels(roots, ids[:, : end - 1], parents, counts=[10, 10], start=start)
        found.append(target.score(rows, nodes).logits)
    logits = torch.cat(found, dim=1)
    made = []
    for index in range(2):
        one = TokenTree(roots[index])
        for token, parent in zip(ids[index].tolist(), parents[1:], strict=True):
            one.add(token, parent, drawn=Drawn.IID)
        made.append(one)
        texts.check(logits[index], rows[index], one)
    target.commit(rows, paths)
    texts.commit(0, made[0], paths[0])
    after = TokenTree(7)
    texts.check(target.score([0], [after]).logits[0], 0, after)


def test_padding_is_left_out_where_it_may_be(target: Target) -> None:
    chain = target.chains_only
    rows, made = [0, 1, 2], [tree(1, 6, chain=chain), tree(2, 0), tree(3, 3, chain=chain)]
    target.prefill(rows, [text(row, 8) for row in rows])
    padded = target.score(rows, made).logits
    scored = target.score(rows, made, padded=False)
    assert padded.shape == (3, 7, target.vocab_size)
    if scored.flat is not None:
        assert scored.logits.shape == (1, 7 + 1 + 4, target.vocab_size)
        for index, one in enumerate(made):
            start = int(scored.flat.starts[index])
            assert torch.allclose(scored.logits[0, start : start + one.size + 1], padded[index, : one.size + 1])


def test_what_does_not_fit_is_refused_and_changes_nothing(target: Target) -> None:
    target.prefill([0], [text(1, SLOTS - 4)])
    before = list(target.lengths)
    refused: list[Callable[[], Any]] = [
        lambda: target.prefill([0], [text(1, 5)]),
        lambda: target.prefill([1], [[]]),
        lambda: target.score([0], [tree(1, 6)]),
        lambda: target.score([0, 0], [tree(1, 1)] * 2),
        lambda: target.score([ROWS], [tree(1, 1)]),
        lambda: target.commit([0], [(1,)]),
        lambda: target.truncate([0], [SLOTS]),
        lambda: target.copy_row(0, 1, SLOTS),
    ]
    for call in refused:
        with pytest.raises(ArgumentError):
            call()
    target.score([0], [tree(1, 2, chain=True)])
    for path in ((3,), (2, 1), (1, 1)):
        with pytest.raises(ArgumentError):
            target.commit([0], [path])
    assert target.lengths == before


def test_clearing_counts_what_was_behind_the_committed_tokens(target: Target) -> None:
    texts = Texts(target)
    target.prefill([0], [text(1, 8)])
    texts.held[0] = text(1, 8)
    assert target.clear(0) == 0
    target.score([0], [tree(1, 5, chain=target.chains_only)])
    assert target.clear(0) > 1
    after = tree(2, 4, chain=target.chains_only)
    texts.check(target.score([0], [after]).logits[0], 0, after)


def test_rows_can_be_announced_for_timing(target: Target) -> None:
    target.announce([0, 1], 30)
    assert target.lengths[:2] == [30, 30]
    assert target.score([0, 1], [tree(1, 4, chain=target.chains_only), tree(2, 0)]).logits.isfinite().all()
    target.truncate([0, 1], [0, 0])
    texts, prompt = Texts(target), text(5, 20)
    found = target.prefill([0], [prompt]).logits[0, 0]
    assert float(divergence(found, texts.logits(prompt)[-1])) < NEAR


def test_a_back_end_says_what_its_costs_depend_on(target: Target, file: Path) -> None:
    other = opened(Path(target.name_or_path) if target.dtype_name == "F32" else file, backend_of(target))
    assert target.identity() == other.identity()
    assert target.memory_bytes() > 100_000


@needs_llama_cpp
def test_more_branches_than_llama_cpp_has_sequences(file: Path) -> None:
    target = opened(file, "llama.cpp", slots=512)
    texts, rows, made = Texts(target), [0, 1, 2], []
    for row in rows:
        target.prefill([row], [text(row, 10)])
        texts.held[row] = text(row, 10)
        made.append(TokenTree(4))
        for node in range(120):
            made[-1].add(3 + (7 * node + row) % 200, 0 if node < 110 else 100 + node - 110, drawn=Drawn.IID)
    logits, paths = target.score(rows, made).logits, [(101, 112), (), (1,)]
    target.commit(rows, paths)
    for row in rows:
        texts.check(logits[row, [0, *paths[row]]], row, chain_of(made[row], paths[row]))
        texts.commit(row, made[row], paths[row])
        after = tree(row, 4)
        texts.check(target.score([row], [after]).logits[0], row, after)
        target.commit([row], [()])
        texts.commit(row, after, ())


def chain_of(made: TokenTree, path: Sequence[int]) -> TokenTree:
    found = TokenTree(made.tokens[0])
    found.add_path([made.tokens[node] for node in path])
    return found


@needs_llama_cpp
def test_free_rows_give_up_what_they_keep_where_the_cache_is_full(file: Path) -> None:
    target = opened(file, "llama.cpp", tokens=256)
    texts = Texts(target)
    for turn in range(6):
        row = turn % 3
        target.truncate([0, 1, 2], [0, 0, 0])
        writes = target.writes[(row + 2) % 3]
        target.prefill([row], [text(turn, 110)])
        texts.held[row] = text(turn, 110)
        made = tree(turn, 6)
        found = target.score([row], [made]).logits[0]
        target.commit([row], [()])
        texts.check(found, row, made)
    assert target.writes[(row + 2) % 3] > writes, "its prefix is known to be gone"


def run_one(target: Target) -> None:
    """A prompt, a tree, a kept path, another tree."""
    texts = Texts(target)
    target.prefill([0], [text(1, 20)])
    texts.held[0] = text(1, 20)
    for turn, path in ((1, (2, 4)), (2, ())):
        made = TokenTree(4 + turn)
        for token, parent in zip(text(turn, 4), (0, 0, 1, 2), strict=True):
            made.add(token, parent, drawn=Drawn.IID)
        found = target.score([0], [made]).logits[0]
        target.commit([0], [path])
        texts.check(found, 0, made)
        texts.commit(0, made, path)


def stands_on_a_wrong_sequence(patch: pytest.MonkeyPatch) -> None:
    run = llama_cpp.Context.run

    def wrong(self: Any, batch: Any) -> Tensor:
        batch.sequences = [[*many, 0] if many[0] >= ROWS else many for many in batch.sequences]
        return run(self, batch)

    patch.setattr(llama_cpp.Context, "run", wrong)


def leaves_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    remove = llama_cpp.Context.remove
    patch.setattr(llama_cpp.Context, "remove", lambda self, sequence, start=0: remove(self, sequence, start + 1))


def stands_one_further(patch: pytest.MonkeyPatch) -> None:
    add = llama_cpp.LlamaBatch.add

    def further(self: Any, token: int, position: int, sequences: list[int], *, wanted: bool) -> None:
        add(self, token, position + (len(self) > 1 and wanted), sequences, wanted=wanted)

    patch.setattr(llama_cpp.LlamaBatch, "add", further)


def gives_the_logits_of_another(patch: pytest.MonkeyPatch) -> None:
    run = llama_cpp.Context.run
    patch.setattr(llama_cpp.Context, "run", lambda self, batch: run(self, batch).roll(1, 0))


def keeps_the_wrong_path(patch: pytest.MonkeyPatch) -> None:
    keep = llama_cpp.LlamaCppTarget._keep

    def wrong(self: Any, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        keep(self, rows, [(1, 3)[: len(path)] for path in paths])

    patch.setattr(llama_cpp.LlamaCppTarget, "_keep", wrong)


@needs_llama_cpp
@pytest.mark.parametrize(
    "fault",
    [
        stands_on_a_wrong_sequence,
        leaves_what_was_rejected,
        stands_one_further,
        gives_the_logits_of_another,
        keeps_the_wrong_path,
    ],
)
def test_a_planted_fault_is_caught_here_and_at_load(
    file: Path, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_one(opened(file, "llama.cpp", self_check=False))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    fault(monkeypatch)
    with pytest.raises((AssertionError, ForerunError)):
        run_one(opened(file, "llama.cpp", self_check=False))
    with pytest.raises(ForerunError):
        opened(file, "llama.cpp")


# --- what the engine makes of it --------------------------------------------------------------------------------------

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "recycling": {"method": "recycling"},
    "prediction": {"method": "prediction", "num_speculative_tokens": 8},
    "auto": {"method": "auto"},
    "merge": {"method": "merge", "drafters": [{"method": "suffix"}, {"method": "recycling"}]},
}


ASKED = [("file", name) for name in [*DRAFTERS, "draft_model", "draft_model tree"]]
ASKED += [("hybrid", name) for name in ("ngram", "auto", "draft_model")]


@needs_llama_cpp
@pytest.mark.parametrize(("which", "name"), ASKED)
def test_answers_are_those_of_plain_decoding(
    which: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config, write = DRAFTERS.get(name), write_tiny if which == "file" else write_tiny_hybrid
    if config is None:
        more = {"model": tiny(seed=1)} if which == "file" else {"seed": 1}
        config = {"method": "draft_model", "model": str(write(tmp_path / "draft.gguf", **more))}
        config |= {"shape": [3, 2, 1]} if "tree" in name else {"num_speculative_tokens": 3}
    config = config | ({} if name == "auto" else {"adaptive": False})
    options: dict[str, Any] = {"max_model_len": 200, "backend": "llama.cpp", "device": "cpu"}
    llm = LLM(request.getfixturevalue(which), speculative_config=config, max_num_seqs=3, **options)
    prompts = [{"prompt_token_ids": text(seed, 5) * 5} for seed in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = llm.generate(prompts, params, speculative=False)
    ours = llm.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in ours] == [one.outputs[0].token_ids for one in plain]
    if name not in ("auto", "prediction") and which == "file":
        assert sum(one.outputs[0].speculation.num_draft_tokens for one in ours) > 0
    if which == "hybrid":
        with pytest.raises(UnsupportedModelError, match=r"recycling drafts trees, and .* runs chains only"):
            llm.generate(prompts[:1], params, speculative={"method": "recycling", "adaptive": False})


@needs_llama_cpp
def test_requests_leave_nothing_behind(file: Path) -> None:
    """Forty of them, chains, trees and plain ones, of which some are aborted; `tests/real` has a thousand."""
    soak(LLM(file, max_num_seqs=3, max_model_len=120, backend="llama.cpp", device="cpu"), 40, tokens=10)


@needs_llama_cpp
@pytest.mark.parametrize("which", ["file", "hybrid"])
def test_answers_are_those_of_llama_cpp_itself(which: str, request: pytest.FixtureRequest) -> None:
    import llama_cpp as other

    file: Path = request.getfixturevalue(which)
    theirs = other.Llama(str(file), n_ctx=256, verbose=False, logits_all=False)
    llm = LLM(file, speculative_config={"method": "suffix"}, max_num_seqs=2, max_model_len=200, backend="llama.cpp")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for seed in range(4):
        prompt, expected = text(seed, 6) * 4, list[int]()
        theirs.reset()
        for token in theirs.generate(prompt, temp=0.0, repeat_penalty=1.0):
            expected.append(token)
            if len(expected) == 40:
                break
        assert llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids == expected


@needs_llama_cpp
@pytest.mark.parametrize("config", [{"method": "early_exit", "exit_layer": 1}, {"method": "quantized_self"}])
def test_drafters_that_need_the_targets_layers_are_refused_by_name(file: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{config['method']} reads hidden states or runs lay.*llama.cpp"):
        LLM(file, speculative_config=config, max_model_len=64, backend="llama.cpp")
    assert isinstance(LLM(file, speculative_config=config, max_model_len=64).target, TransformersTarget)


@needs_llama_cpp
def test_options_that_llama_cpp_does_not_have_are_refused(file: Path, tmp_path: Path) -> None:
    for more, words in (
        ({"dtype": "float32"}, "leave dtype away"),
        ({"revision": "main"}, "revision: no option of llama.cpp"),
        ({"rows": 200}, "rows must be in 1..128"),
    ):
        with pytest.raises(ArgumentError, match=words):
            load_target(file, backend="llama.cpp", **more)
    with pytest.raises(OutOfMemoryError, match=r"GiB are needed .*kv_cache_tokens\) to \d+"):
        LLM(file, backend="llama.cpp", kv_cache_tokens=10**10, device="cpu")
    with pytest.raises(ArgumentError, match=r"reproducible=True cannot hold on llama\.cpp"):
        LLM(file, backend="llama.cpp", reproducible=True, max_model_len=64)
    with pytest.raises(ArgumentError, match=r"llama\.cpp runs GGUF files"):
        load_target("demo", backend="llama.cpp")
    with pytest.raises(ArgumentError, match=r"(?i)did you mean"):
        load_target(file, backend="llama_cpp")
    pooled = write_tiny(tmp_path / "embedding.gguf", more=lambda writer: writer.add_pooling_type(gguf.PoolingType.MEAN))
    with pytest.raises(CheckpointError, match="generates no text"):
        load_target(pooled, backend="llama.cpp")


def test_auto_takes_what_multiplies_the_files_blocks(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Our own kernels on a CPU that has them, llama.cpp where they or transformers do not run the file."""
    unread = tmp_path / "unread.gguf"
    unread.write_bytes(file.read_bytes().replace(b"llama", b"lllll"))
    ours = products.ready(torch.bfloat16)
    for installed in (True, False):
        monkeypatch.setattr(llama_context, "installed", lambda there=installed: there)
        monkeypatch.setattr(llama_context, "has_accelerator", lambda: False)
        assert file_for_llama_cpp(file) == (None if ours or not installed else file)
        assert file_for_llama_cpp(unread) == (unread if installed else None)
        assert file_for_llama_cpp(file, dtype="float32") is None
    monkeypatch.setattr(llama_context, "installed", lambda: True)
    monkeypatch.setattr(llama_context, "has_accelerator", lambda: True)
    assert file_for_llama_cpp(file) == file
    assert file_for_llama_cpp(file, device="cpu") == (None if ours else file)
    with pytest.raises(ArgumentError, match="there is no device cuda:77"):  # Before what would run the file faster
        file_for_llama_cpp(file, device="cuda:77")
