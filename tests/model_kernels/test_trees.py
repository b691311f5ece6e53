"""A node of a tree has the bits of plain decoding: in attention alone, and in whole models with what they keep."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.tree import TokenTree
from forerun.model import Buckets, TransformersTarget
from forerun.model.inputs import Flat, Nodes, TreePaths
from forerun.model.kernels import native
from forerun.model.kernels.accelerate import accelerate
from model_kernels.conftest import build

pytestmark = pytest.mark.usefixtures("in_c", "packed")
LOWEST = torch.finfo(torch.bfloat16).min
SHAPES: dict[str, Callable[[int, random.Random], list[int]]] = {  # Parents of so many drafted nodes
    "chain": lambda size, _: list(range(size)),
    "star": lambda size, _: [0] * size,
    "binary": lambda size, _: [node // 2 for node in range(size)],
    "bushy": lambda size, draw: [draw.randrange(node + 1) for node in range(size)],
    "deep": lambda size, draw: [max(0, node - draw.choice([0, 0, 0, 1, 2])) for node in range(size)],
    "comb": lambda size, _: [max(0, node - 1 - node % 2) for node in range(size)],  # every second node is a leaf
}


def trees(kind: str, sizes: Sequence[int], seed: int = 0) -> list[TokenTree]:
    """Of so many drafted nodes each."""
    draw = random.Random(f"{kind} {seed}")
    return [
        TokenTree.of(draw.randrange(3, 120), [draw.randrange(3, 120) for _ in range(size)], SHAPES[kind](size, draw))
        for size in sizes
    ]


def way(tree: TokenTree, node: int) -> list[int]:
    """The nodes from the root down to this one."""
    found = [node]
    while found[0]:
        found.insert(0, tree.parents[found[0]])
    return found


def differing(
    drafts: Sequence[TokenTree],
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (6, 2),
    depths: tuple[int, int] = (64, 64),
    window: int | None = None,
    ordered: bool = True,
) -> int:
    """Nodes whose attention differs in a bit from that of plain decoding, which finds their path's keys in a row.
    `ordered`: whether attention is told the paths."""
    torch.manual_seed(sum(lengths))
    nodes, batch = Nodes.of_trees(drafts), len(drafts)
    count, width = nodes.ids.shape[1], max(lengths) + nodes.ids.shape[1] + 7
    query = torch.randn(batch, count, heads[0], depths[0]).bfloat16().transpose(1, 2)
    key = torch.randn(batch, width, heads[1], depths[0]).bfloat16().transpose(1, 2)
    value = torch.randn(batch, width, heads[1], depths[1]).bfloat16().transpose(1, 2)
    mask = torch.full((batch, 1, count, width), LOWEST).bfloat16()
    ways = [[[*range(length), *(length + one for one in way(tree, node))] for node in range(tree.size + 1)]
            for tree, length in zip(drafts, lengths, strict=True)]  # fmt: skip
    for row, own in enumerate(ways):
        for node, slots in enumerate(own):
            mask[row, 0, node, slots[-window if window else 0 :]] = 0
    paths = None if nodes.paths is None or not ordered else TreePaths(torch.tensor(lengths), nodes.paths)
    found = native.attend(query, key, value, mask, 0.125, paths=paths)
    wrong = 0
    if (flat := Flat.of(nodes.real)) is not None:  # without the padding every node has the same bits
        some = flat.flatten(query.transpose(1, 2)).transpose(1, 2)
        alone = native.Attention(some, key, value, mask, 0.125, paths=paths, flat=flat).run()
        wrong += not torch.equal(alone, flat.flatten(found))
    for row, own in enumerate(ways):
        for node, slots in enumerate(own):
            seen = torch.zeros(1, 1, 1, len(slots)).bfloat16()
            seen[..., : max(0, len(slots) - window) if window else 0] = LOWEST
            one, at = slice(row, row + 1), slice(node, node + 1)
            plain = native.attend(query[one, :, at], key[one][:, :, slots], value[one][:, :, slots], seen, 0.125)
            wrong += not torch.equal(plain[0, 0], found[row, node])
    return wrong


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("length", [0, 1, 6, 57, 111, 127, 128, 255, 300])
def test_a_nodes_attention_is_that_of_its_path_alone(kind: str, length: int) -> None:
    for size in (1, 2, 7, 16, 33, 90):
        assert differing(trees(kind, [size], length), [length]) == 0, size


@pytest.mark.parametrize(
    ("heads", "depths"),
    [((4, 4), (32, 32)), ((6, 2), (64, 96)), ((8, 2), (96, 32)), ((5, 1), (192, 128)), ((8, 2), (256, 256))],
)
def test_heads_of_every_kind(heads: tuple[int, int], depths: tuple[int, int]) -> None:
    assert differing(trees("bushy", [24]), [119], heads=heads, depths=depths) == 0


@pytest.mark.parametrize("kind", SHAPES)
def test_rows_of_unequal_length_and_size(kind: str) -> None:
    drafts = [*trees(kind, [21, 3, 40]), TokenTree(7), *trees("chain", [12])]
    assert differing(drafts, [5, 126, 90, 250, 0]) == 0


def test_a_processor_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 dot products multiply as many rows as there are."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    native.attention_kernel.cache_clear()
    try:
        for kind in SHAPES:
            for length, heads in ((0, (6, 2)), (119, (5, 1)), (250, (4, 4))):
                assert differing(trees(kind, [24, 3]), [length, 7], heads=heads, depths=(96, 32)) == 0
    finally:
        native.attention_kernel.cache_clear()


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_heads_that_threads_share(threads: int) -> None:
    held = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert differing(trees("bushy", [24]), [119], heads=(9, 3)) == 0
        assert differing(trees("deep", [70]), [250], heads=(9, 1)) == 0
    finally:
        torch.set_num_threads(held)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 70, 130])
def test_windows_that_end_anywhere(window: int) -> None:
    for length in (3, 64, 125, 260):
        drafts = [*trees("deep", [40], window), *trees("bushy", [20], window)]
        assert differing(drafts, [length, length], window=window) == 0


def test_a_path_longer_than_a_block() -> None:
    assert all(differing(trees("comb", [400]), [length]) == 0 for length in (0, 100, 127))


def test_keys_in_the_order_of_their_slots_have_other_bits() -> None:
    """The negative control: what would be without paths."""
    assert differing(trees("deep", [90]), [120], ordered=False) > 5
    assert differing(trees("chain", [60]), [100], ordered=False) == 0


def test_paths_are_handed_over_for_branches_alone() -> None:
    assert Nodes.of_trees([*trees("chain", [3, 7]), TokenTree(5)]).paths is None
    assert Nodes.of_prompt([[1, 2, 3]]).paths is None
    paths = Nodes.of_trees([TokenTree.of(5, [6, 7, 8], [0, 0, 1]), TokenTree(4)]).paths
    assert paths is not None
    assert paths[0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3]]
    assert paths[1, 0].tolist() == [0, -1, -1]


@pytest.mark.parametrize("wrong", ["long", "behind", "dtype", "batch", "count"])
def test_paths_that_lead_nowhere_are_refused(wrong: str) -> None:
    query = torch.randn(2, 4, 5, 64).bfloat16()
    key = value = torch.randn(2, 2, 70, 64).bfloat16()
    mask, nodes = torch.zeros(2, 1, 5, 70).bfloat16(), torch.zeros(2, 5, 3, dtype=torch.int32)
    lengths = torch.tensor([3, 71 if wrong == "behind" else 69])
    nodes[0, 4, 2] = 67 if wrong == "long" else 66
    if wrong == "dtype":
        nodes = nodes.long()
    nodes = {"batch": nodes[:1], "count": nodes[:, :4]}.get(wrong, nodes)
    with pytest.raises(ValueError, match="paths within W"):
        native.attend(query, key, value, mask, 0.125, paths=TreePaths(lengths, nodes))


FAMILIES: dict[str, dict[str, Any]] = {
    **{"llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {"num_key_value_heads": 1}},
}


def target(family: str, rows: int) -> TransformersTarget:
    options = {"head_dim": 32, "max_position_embeddings": 512} | FAMILIES[family]
    if family == "qwen2":
        options |= {"hidden_size": 128}  # it has no `head_dim` of its own
    model = build(family, **options)
    accelerate(model)
    return TransformersTarget(model, rows=rows, slots=200)


def plainly(made: TransformersTarget, row: int, tokens: Sequence[int], *, keep: bool = False) -> Tensor:
    """Logits (N, V) after each of the tokens, one step each; they are kept in the cache only if told to."""
    held, found = made.lengths[row], []
    for token in tokens:
        found.append(made.score([row], [TokenTree(token)]).logits[0, 0].clone())
        made.commit([row], [()])
    if not keep:
        made.truncate([row], [held])
    return torch.stack(found)


def unlike_plain(
    made: TransformersTarget, plain: TransformersTarget, kind: str, seed: int, sizes: Sequence[int] = (16, 7, 2)
) -> int:
    """Trees are scored, a path of each is kept, then some tokens follow one by one, all in both ways: the number of
    nodes, cached tokens and later steps that differ in a bit."""
    draw, rows, wrong = random.Random(seed), [0, 1, 2], 0
    drafts = trees(kind, sizes, seed)
    logits, kept = made.score(rows, drafts).logits, []
    for row, tree in zip(rows, drafts, strict=True):
        for leaf in set(range(tree.size + 1)) - set(tree.parents):
            own = way(tree, leaf)
            expected = plainly(plain, row, [tree.tokens[one] for one in own])
            wrong += int((logits[row, own] != expected).any(-1).sum())
        kept.append(way(tree, draw.randrange(tree.size + 1)))
        plainly(plain, row, [tree.tokens[one] for one in kept[-1]], keep=True)
    made.commit(rows, [tuple(path[1:]) for path in kept])
    for row in rows:
        for layer in range(made.num_layers):
            held = [one.cache.read(layer, row, one.lengths[row]) for one in (made, plain)]
            wrong += sum(int((own != other).flatten(1).any(-1).sum()) for own, other in zip(*held, strict=True))
        later = [draw.randrange(3, 120) for _ in range(2)]
        wrong += int((plainly(made, row, later) != plainly(plain, row, later)).any(-1).sum())
    return wrong


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> list[TransformersTarget]:
    """Two targets of a family that hold the same prompts."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 120) for _ in range(120 - 50 * row)] for row in range(3)]
    made = [target(request.param, 3) for _ in range(2)]
    for one in made:
        one.prefill([0, 1, 2], prompts)
    return made


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_a_model_scores_and_keeps_every_node_as_plain_decoding_does(pair: list[TransformersTarget]) -> None:
    for step, kind in enumerate(("deep", "bushy", "binary")):
        assert unlike_plain(*pair, kind, step) == 0


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_passes_over_many_nodes_are_no_others(pair: list[TransformersTarget]) -> None:
    """Products of more than 32 rows take another way in oneDNN."""
    assert unlike_plain(*pair, "binary", 0, sizes=(44, 19, 2)) == 0


@pytest.mark.parametrize("pair", ["llama", "mistral"], indirect=True)
def test_reproducible_mode_needs_no_own_kernel(pair: list[TransformersTarget], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch attends, which knows slots alone, each node is then handed its keys in their order."""
    monkeypatch.setattr(native, "attention_kernel", lambda: None)
    for one in pair:
        one.buckets = Buckets(nodes=(17,))
    for step, kind in enumerate(("deep", "bushy", "binary")):
        assert unlike_plain(*pair, kind, step) == 0


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_without_paths_a_model_would_not(pair: list[TransformersTarget], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(TransformersTarget, "_paths", lambda *_: [])
    assert sum(unlike_plain(*pair, "deep", step) for step in range(3)) > 0
