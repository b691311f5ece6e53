"""Gemma 4's assistants draft what transformers' own say of the target's keys and values, on every branch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError, CheckpointError
from forerun.heads.files import TargetFacts, differences, read_head, write_head
from forerun.heads.runner import SharingRunner
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from llamas import tiny_llama

VOCABULARY, HIDDEN, WINDOW = 48, 32, 5
TEXT = torch.randint(1, VOCABULARY, (14,), generator=torch.Generator().manual_seed(3)).tolist()
COMMON: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"global_head_dim": 16, "sliding_window": WINDOW, "max_position_embeddings": 128, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": None},
}
PER_LAYER = ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
KINDS = ["sliding_attention", "full_attention"]


def spread(model: Any) -> Any:
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if weight.is_floating_point() and "inv_freq" not in name and "scale" not in name:
            weight.data.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    return model.eval()


@pytest.fixture(scope="module", params=[False, True], ids=["large", "small"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a target and of its assistant. The last layers of small targets share keys and values, and their
    assistants look at some tokens alone.
    """
    torch.manual_seed(1)
    folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("assistant")
    small = request.param
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 6}
    sizes |= dict.fromkeys(PER_LAYER, 0) | {"num_kv_shared_layers": 0}
    if small:
        sizes |= {"num_kv_shared_layers": 2, PER_LAYER[0]: VOCABULARY, PER_LAYER[1]: 8}
    target = spread(Gemma4ForCausalLM(Gemma4TextConfig(**COMMON, **sizes, layer_types=KINDS * 3)))
    target.save_pretrained(folders[0])
    layers = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_kv_shared_layers": 4}
    layers |= dict.fromkeys(PER_LAYER, 0)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**COMMON, **layers, layer_types=KINDS * 2),
        **{"backbone_hidden_size": HIDDEN, "use_ordered_embeddings": small},
        **{"num_centroids": 12, "centroid_intermediate_top_k": 3},
    )
    assistant = spread(Gemma4AssistantForCausalLM(config))
    if small:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    assistant.save_pretrained(folders[1])
    return folders


@torch.no_grad()
def expected_path(target: Any, assistant: Any, path: list[int]) -> list[torch.Tensor]:
    """(V,) for each depth, by transformers' assistant over what the target keeps of the text before the root."""
    found = target(torch.tensor([TEXT[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    state, logits = found.hidden_states[-1][:, -1:], list[torch.Tensor]()
    for token in (TEXT[-1], *path):
        embeds = target.get_input_embeddings()(torch.tensor([[token]]))
        made = assistant(
            inputs_embeds=torch.cat([embeds, state], -1),
            position_ids=torch.tensor([[len(TEXT) - 1]]),
            shared_kv_states=dict(found.shared_kv_states),
        )
        state = made.last_hidden_state
        logits.append(made.logits[0, -1])
    return logits


@torch.no_grad()
def test_every_depth_of_every_branch_reads_as_transformers_assistant_does(pair: tuple[Path, Path]) -> None:
    """In the second of two rows, behind a text that came in two parts; longer than the window."""
    model = Gemma4ForCausalLM.from_pretrained(pair[0]).eval()
    assistant = Gemma4AssistantForCausalLM.from_pretrained(pair[1]).eval()
    target = TransformersTarget(model, rows=2, slots=64)
    runner = SharingRunner(read_head(pair[1]).build(torch.float32).eval(), target, rows=2, slots=64)
    for row, text in ((0, TEXT[:4]), (1, TEXT)):
        for start, stop in ((0, 2), (2, len(text) - 1)):
            seen = target.prefill([row], [text[start:stop]], boundaries={LAST_HIDDEN}).hidden_states
            runner.ingest([row], [text[start + 1 : stop + 1]], seen)
    branches = [[11, 12, 13], [21, 22, 23]]

    def levels(logits: torch.Tensor) -> list[torch.Tensor]:
        found = [logits[1].expand(2, -1)]
        for two in zip(*branches, strict=True):
            parents = torch.tensor([[0, min(1, len(found) - 1)]] * 2)
            found.append(runner.descend(torch.tensor([two] * 2), parents)[1])
        return found

    drafted = runner.unroll([0, 1], 12, levels)
    for branch, path in enumerate(branches):
        for own, wanted in zip(drafted, expected_path(model, assistant, path), strict=True):
            seen = own[branch] > torch.finfo(torch.float32).min  # what no likely group holds is never drafted
            assert seen.sum() == (12 if read_head(pair[1]).config.num_centroids else VOCABULARY)
            torch.testing.assert_close(own[branch][seen], wanted[seen], atol=3e-4, rtol=1e-3)


GREEDY = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
CHAIN, TREE = {"num_speculative_tokens": 4}, {"top_k": 3, "nodes": 8}


@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
def test_answers_are_those_of_transformers(options: dict[str, Any], pair: tuple[Path, Path]) -> None:
    model: Any = Gemma4ForCausalLM.from_pretrained(pair[0]).eval()
    texts = [TEXT, TEXT[:3], TEXT[5:]]
    config = {"method": "gemma4_assistant", "model": str(pair[1]), "adaptive": False, **options}
    llm = LLM(str(pair[0]), tokenizer=False, speculative_config=config, self_check=False, max_num_seqs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], GREEDY)
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([text])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        answer = output.outputs[0]
        assert answer.token_ids == made[0, len(text) :].tolist()
        assert answer.speculation.drafted_per_depth and not answer.speculation.drafter_errors


def test_files_are_written_as_they_were(pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = read_head(pair[1])
    alone = write_head(head, tmp_path / "head", "gemma4_assistant", TargetFacts.read(pair[0]))
    assert differences(head, read_head(alone)) == []
    whole, own = (load_file(folder / "model.safetensors") for folder in (pair[1], alone))
    assert own.keys() == whole.keys() and all(torch.equal(own[name], whole[name]) for name in own)
    assert Gemma4AssistantForCausalLM.from_pretrained(alone).config.backbone_hidden_size == HIDDEN


def test_what_cannot_be_drafted_with_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = {"method": "gemma4_assistant", "model": str(pair[1])}
    with pytest.raises(ArgumentError, match="no layer of the kind sliding_attention"):
        LLM(tiny_llama(VOCABULARY), tokenizer=False, speculative_config=config, self_check=False)
    keys = json.loads((pair[1] / "config.json").read_text())
    del keys["backbone_hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (tmp_path / "model.safetensors").write_bytes((pair[1] / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="has a text_config and backbone_hidden_size"):
        read_head(tmp_path)
