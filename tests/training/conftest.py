"""A tiny target on disk, what it writes, and the words that train a head for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.manifests import TokenizerIdentity
from forerun.training.data.store import write_prepared
from training.ttt import VOCABULARY, model


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint, with a tokenizer of one word per token."""
    folder = tmp_path_factory.mktemp("target")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prepared(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target writes by itself, so that a head can learn it."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    llm = LLM(model(), tokenizer=False)
    prompts = [{"prompt_token_ids": [first]} for first in range(VOCABULARY)]
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    answered = zip(prompts, llm.generate(prompts, params), strict=True)
    texts = [[*prompt["prompt_token_ids"], *output.outputs[0].token_ids] for prompt, output in answered]
    documents = [(tokens, [False] + [True] * (len(tokens) - 1)) for tokens in texts]
    write_prepared(folder, documents, TokenizerIdentity.of(tokenizer))
    return folder


def words(target: Path, prepared: Path, output: Path, steps: int) -> list[str]:
    return [
        *("train", "eagle3", "--json", "--target", str(target), "--data", str(prepared), "--output", str(output)),
        *(f"training.steps={steps}", "training.learning_rate=1e-2", "training.dtype=float32"),
        *("target_dtype=float32", "windows.length=64", "windows.rows=4", "objective.steps=3", "draft.vocab_size=32"),
        *("draft.options={fc_norm: true, norm_output: true, boundaries: [1, 2, 3]}",),
        *(f"evaluation.prompts={prepared}", "evaluation.count=3", "evaluation.prompt_tokens=4"),
        *("evaluation.settings={max_tokens: 16, top_k: 2, nodes: 6}",),
    ]
