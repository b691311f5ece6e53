"""Every causal LM of transformers, small and random: it is served as its own generate answers, or refused in words."""

import re
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forerun.core.tree import TokenTree
from forerun.errors import UnsupportedModelError
from forerun.model import Buckets, TransformersTarget
from forerun.types import LAST_HIDDEN, Drawn
from model.families import FAMILIES, make, plain, random_tokens
from model.tiny import build
from selection import one_in

SERVED = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bigbird_pegasus
    biogpt bitnet blenderbot blenderbot-small bloom codegen cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 diffllama dory dots1 emu3 ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text
    gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa
    got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
    hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe
    kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mamba mamba2
    marian mbart mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3
    mistral mixtral mllama modernbert-decoder moss_transcribe_diarize mpt mvp nanochat nemotron nemotron_h olmo
    olmo2 olmo3 olmo_hybrid olmoe opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart qwen2 qwen2_moe
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma
    rwkv sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm
    xlstm youtu zamba zamba2 zaya
"""
UNBUILT = """
    blt cohere_compass_text dbrx dots3_note dots3_note_text gemma3n gemma4_assistant gemma4_unified_assistant
    musicgen musicgen_melody qwen4_exp
"""
"""No small model comes out of the sizes in `tiny`, or a package is missing."""
AS_DECODERS = ["bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert", "roc_bert"]
"""Encoders, which are causal where their configuration says `is_decoder`."""
WITH_IMAGES = ("kimi_k25", "qwen3_vl_moe", "mistral4", "lfm2_vl", "minicpmv4_6", "step3p7")
TECHNICAL = re.compile(r"SlotCache|AttributeError|has no attribute|NoneType|self\\.|torch\\.Size")
DEPTHS = (3, 0, 2, 1)
"""Tokens of a tree that are right, by step."""


BUILT = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(UNBUILT.split()))
REFUSED = [kind for kind in BUILT if kind not in SERVED.split()]


@pytest.mark.parametrize("kind", [*one_in(4, SERVED.split()), *one_in(3, REFUSED)])
def test_family(kind: str) -> None:
    model = build(kind)
    if kind in SERVED.split():
        compare(TransformersTarget.load(model, rows=2, slots=96), model)
        return
    with pytest.raises(UnsupportedModelError) as caught:
        TransformersTarget.load(model, rows=2, slots=96)
    assert len(str(caught.value)) > 60
    assert not TECHNICAL.search(str(caught.value)), caught.value


@pytest.mark.parametrize("kind", one_in(3, AS_DECODERS))
def test_an_encoder_that_was_made_a_decoder(kind: str) -> None:
    model = build(kind, is_decoder=True)
    compare(TransformersTarget.load(model, rows=2, slots=96), model)


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_a_model_for_images_and_texts_answers_texts(kind: str, tmp_path: Path) -> None:
    """It is opened by its name, though transformers has no causal LM of that family."""
    model = build(kind)
    model.save_pretrained(tmp_path)
    compare(TransformersTarget.load(tmp_path, rows=2, slots=96), model)


def compare(target: TransformersTarget, model: Any, lengths: tuple[int, int] = (5, 21), new: int = 10) -> None:
    """Greedy decoding with trees, of two rows at once, gives what transformers' own generate gives for each alone."""
    vocabulary = target.vocab_size
    prompts = [[3 + token % (vocabulary - 3) for token in random_tokens(length, length)] for length in lengths]
    wanted = [greedy(model, prompt, new) for prompt in prompts]
    target.prefill([0, 1], [prompt[:-1] for prompt in prompts])
    roots, done, depths = [prompt[-1] for prompt in prompts], [0, 0], cycle(DEPTHS)
    while max(done) + max(DEPTHS) < new:
        depth = [next(depths), next(depths)]
        paths = [answer[begun : begun + right] for answer, begun, right in zip(wanted, done, depth, strict=True)]
        logits = target.score([0, 1], list(map(partial(branching, vocabulary), roots, paths))).logits
        for row, path in enumerate(paths):
            said = logits[row, [0, *ids(path)]].argmax(-1).tolist()
            assert said == wanted[row][done[row] : done[row] + len(path) + 1], (row, done)
            done[row] += len(path) + 1
        target.commit([0, 1], [ids(path) for path in paths])
        roots = [answer[begun - 1] for answer, begun in zip(wanted, done, strict=True)]


def branching(vocabulary: int, root: int, path: list[int]) -> TokenTree:
    """A tree in which every token of `path` comes behind a sibling that is wrong and has a child of its own."""
    tree, parent = TokenTree(root), 0
    for token in path:
        wrong = tree.add((token + 1) % vocabulary, parent)
        tree.add(token, wrong)
        parent = tree.add(token, parent)
    return tree


def ids(path: list[int]) -> tuple[int, ...]:
    """The nodes of `path` in `branching`."""
    return tuple(3 * place for place in range(1, len(path) + 1))


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    """What transformers' own generate adds to a prompt."""
    given = torch.tensor([prompt])
    config = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 0
    answer = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    found: list[int] = answer[0, len(prompt) :].tolist()
    return found


TOLERANCE = 2e-5
SHAPES = [[0, 0, 1, 1, 2, 5, 0], [0, 1, 2, 2], [0, 0, 0, 3, 3, 5]]
"""Parents of the nodes of each row's tree."""
PATHS = [[(1, 3), (), (3, 5)], [(2, 5, 6), (1, 2, 4), (2,)], [(7,), (1,), (3, 5, 6)]]
"""What is accepted, by round and row."""


def trees(round_: int, roots: Sequence[int] = (4, 5, 6)) -> list[TokenTree]:
    """A tree per root, by the parents in `SHAPES`; siblings may hold the same token."""
    made = []
    for row, (root, parents) in enumerate(zip(roots, SHAPES, strict=False)):
        tree = TokenTree(root)
        for token, parent in zip(random_tokens(len(parents), 100 + 10 * round_ + row), parents, strict=True):
            tree.add(token, parent, drawn=Drawn.IID)
        tree.draft_probs = {node: torch.full((99,), 1 / 99) for node in {*parents}}
        made.append(tree)
    return made


def node_error(model: Any, committed: list[int], tree: TokenTree, logits: torch.Tensor) -> float:
    """Largest error of one row's node logits (N, V) against plain forwards of the paths to the leaves."""
    worst = 0.0
    for leaf in range(tree.size + 1):
        if leaf in tree.parents[1:]:
            continue
        path = tree.path(leaf)
        expected = plain(model, committed + [tree.tokens[node] for node in path])[len(committed) - 1 :]
        worst = max(worst, (logits[[0, *path]] - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("name", FAMILIES)
def test_every_node_equals_a_plain_forward_of_its_path(name: str) -> None:
    model = make(name)
    target = TransformersTarget.load(model, rows=4, slots=64, self_check=False)
    rows = [0, 1, 3]
    sequences = [random_tokens(count, row) for row, count in enumerate((6, 20, 34))]
    prefilled = target.prefill(rows, [tokens[:-1] for tokens in sequences], all_logits=True)
    for index, tokens in enumerate(sequences):
        expected = plain(model, tokens[:-1])
        assert (prefilled.logits[index, : len(expected)] - expected).abs().max() <= TOLERANCE
    for round_, paths in enumerate(PATHS):
        drafted = trees(round_, [tokens[-1] for tokens in sequences])
        logits = target.score(rows, drafted).logits
        for index, tree in enumerate(drafted):
            assert node_error(model, sequences[index], tree, logits[index]) <= TOLERANCE, (round_, index)
            sequences[index] += [tree.tokens[node] for node in paths[index]] + [7 + round_]
        target.commit(rows, paths)
        assert [target.lengths[row] for row in rows] == [len(tokens) - 1 for tokens in sequences]
    compare_cache(target, rows, sequences)


def compare_cache(target: TransformersTarget, rows: list[int], sequences: list[list[int]]) -> None:
    """What the rounds left in the slots is what a prefill of the same tokens writes."""
    fresh = TransformersTarget.load(target.model, rows=len(rows), slots=64, self_check=False)
    fresh.prefill(range(len(rows)), [tokens[:-1] for tokens in sequences])
    assert fresh.cache._stores.keys() == target.cache._stores.keys()
    for layer in fresh.cache._stores:
        for index, row in enumerate(rows):
            grown = target.cache.read(layer, row, target.lengths[row])
            for ours, theirs in zip(grown, fresh.cache.read(layer, index, fresh.lengths[index]), strict=True):
                assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_a_chain_mask_is_caught(name: str) -> None:
    """The negative control: the same tokens as a chain give other logits, so the comparison above can fail."""
    model = make(name)
    target = TransformersTarget.load(model, rows=1, slots=64, self_check=False)
    tokens = random_tokens(20, 1)
    target.prefill([0], [tokens[:-1]])
    tree = trees(0, [tokens[-1]])[0]
    chain = TokenTree(tokens[-1])
    chain.add_path(tree.tokens[1:])
    logits = target.score([0], [chain]).logits
    assert node_error(model, tokens, tree, logits[0]) > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_boundaries_are_the_models_hidden_states(name: str) -> None:
    model = make(name)
    target = TransformersTarget.load(model, rows=2, slots=64, self_check=False)
    wanted = frozenset({0, 1, 3, LAST_HIDDEN})
    tokens = [random_tokens(13, 1), random_tokens(5, 2)]
    caught = target.prefill([0, 1], tokens, boundaries=wanted).hidden_states
    with torch.inference_mode():
        for row, ids in enumerate(tokens):
            states = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
            for boundary in wanted:
                assert (caught[boundary][row, : len(ids)] - states[boundary][0]).abs().max() <= 5 * TOLERANCE
    scored = target.score([0, 1], trees(0, [5, 6]), boundaries=wanted)
    assert {place: value.shape for place, value in scored.hidden_states.items()} == dict.fromkeys(wanted, (2, 8, 64))
    assert torch.equal(target.lm_head(scored.hidden_states[LAST_HIDDEN]), scored.logits)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "deepseek_v3"])
def test_padding_to_buckets_changes_nothing(name: str) -> None:
    model = make(name)
    exact = TransformersTarget.load(model, rows=3, slots=256, self_check=False)
    padded = TransformersTarget.load(model, rows=3, slots=256, self_check=False)
    padded.buckets = Buckets(nodes=(4, 16), width=128)
    tokens = [random_tokens(count, count) for count in (3, 9, 17)]
    results = []
    for target in (exact, padded):
        target.prefill([0, 1, 2], tokens)
        results.append(target.score([0, 1, 2], trees(0)).logits)
    counts = [len(parents) + 1 for parents in SHAPES]
    for row, count in enumerate(counts):
        assert (results[0][row, :count] - results[1][row, :count]).abs().max() <= TOLERANCE
