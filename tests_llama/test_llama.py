"""forerun's drafters in llama-cpp-python, on the demo target as a GGUF file: the text is what it is without them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel
from transformers import AutoTokenizer

from forerun import LLM, SamplingParams
from forerun.demo import prompts
from forerun.deploy.llama_cpp import ForerunDraft
from forerun.deploy.trials.try_llama_cpp import convert_to_gguf
from forerun.shipped import resolve
from tests_llama.conftest import TARGET

CONTEXT, TOKENS = 1024, 64
CONFIGS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "adaptive": False},
    "ngram": {"method": "ngram", "adaptive": False},
    "merge": {"method": "merge", "drafters": ["suffix", "ngram"], "adaptive": False},
    "own": {"method": "tests.deploy.own_drafter:Periodic", "period": 1, "adaptive": False},
    "adaptive": {"method": "suffix"},
    "adaptive merge": {"method": "merge", "drafters": ["suffix", "ngram"]},
    "adaptive first_of": {"method": "first_of", "drafters": ["suffix", "ngram"]},
    "auto": {"method": "auto"},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Path:
    made = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    return convert_to_gguf(sources, Path(sys.executable), TARGET, made, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve("demo"))


@pytest.fixture(scope="module")
def texts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(one.text, verbose=False)[: 200 + 40 * index] for index, one in enumerate(prompts()[:4])]


class Counted(LlamaDraftModel):
    def __init__(self, draft: LlamaDraftModel) -> None:
        self.draft, self.sizes = draft, list[int]()

    def __call__(self, ids: Any, /, **options: Any) -> Any:
        found = self.draft(ids, **options)
        self.sizes.append(len(found))
        return found


def opened(file: Path, draft: LlamaDraftModel | None = None) -> Llama:
    return Llama(str(file), n_ctx=CONTEXT, draft_model=draft, logits_all=draft is not None, verbose=False)


def answer(model: Llama, text: Sequence[int], **options: Any) -> list[int]:
    model.reset()
    return list(islice(model.generate(list(text), repeat_penalty=1.0, **options), TOKENS))


@pytest.fixture(scope="module")
def plain(file: Path, texts: list[list[int]]) -> list[list[int]]:
    model = opened(file)
    return [answer(model, text, temp=0.0) for text in texts]


def test_the_file_is_the_model(file: Path, texts: list[list[int]], plain: list[list[int]], tokenizer: Any) -> None:
    ours = LLM("demo", dtype="float32").generate(texts, SamplingParams(temperature=0, max_tokens=TOKENS))
    same = [list(one.outputs[0].token_ids) == found for one, found in zip(ours, plain, strict=True)]
    assert sum(same) >= len(same) - 1, "two ways to add up floats may part once"
    model = opened(file)
    source = prompts()[0].text[:2000]
    assert model.tokenize(source.encode(), add_bos=False) == tokenizer.encode(source, verbose=False)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_text_is_that_of_plain_decoding(
    file: Path, texts: list[list[int]], plain: list[list[int]], config: dict[str, Any]
) -> None:
    draft = Counted(ForerunDraft(config))
    model = opened(file, draft)
    assert [answer(model, text, temp=0.0) for text in texts] == plain
    least = 20 if "adaptive" in config else 0  # A policy decides by what its steps take, here beside whatever else runs
    assert sum(draft.sizes) > least, "something was drafted"
    assert len(draft.sizes) < TOKENS * len(texts), "and accepted"


def test_one_draft_model_after_the_other_text(file: Path, texts: list[list[int]], plain: list[list[int]]) -> None:
    model = opened(file, ForerunDraft({"method": "suffix", "adaptive": False}))
    for number in (0, 1, 0, 3, 3):
        assert answer(model, texts[number], temp=0.0) == plain[number]


def test_a_completion_through_its_own_api(file: Path) -> None:
    found = []
    for draft in (None, ForerunDraft()):
        model = opened(file, draft)
        made = model.create_completion("import os\nimport sys\nimport os\n", max_tokens=40, temperature=0.0)
        found.append(made["choices"][0]["text"])
    assert found[0] == found[1]
