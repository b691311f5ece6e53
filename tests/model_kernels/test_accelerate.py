import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from emulation import needs_bfloat16
from forerun.core.tree import TokenTree
from forerun.model import TransformersTarget
from forerun.model.kernels.accelerate import CompiledForward, accelerate
from model_kernels.conftest import build

pytestmark = needs_bfloat16


def tree(*paths: list[int]) -> TokenTree:
    made = TokenTree(5)
    for path in paths:
        made.add_path(path)
    return made


def passes(target: TransformersTarget) -> list[torch.Tensor]:
    """Logits of a prefill, chains of several lengths, a tree, and a second row, over two cache widths."""
    logits = [target.prefill([0], [list(range(3, 50))]).logits]
    for tokens in ([], [7], [7, 8, 9], list(range(7, 22))):
        logits.append(target.score([0], [tree(tokens)]).logits)
    logits.append(target.score([0], [tree([7, 8], [7, 9], [10])]).logits)
    target.commit([0], [(1, 3)])
    target.prefill([0], [list(range(3, 30))])
    logits.append(target.score([0], [tree([7, 8])]).logits)
    return logits


@pytest.fixture(scope="module")
def targets() -> tuple[TransformersTarget, TransformersTarget]:
    """The same model plain and compiled."""
    plain = build("qwen3")
    compiled = copy.deepcopy(plain)
    assert accelerate(compiled, compile=True).compiled
    return TransformersTarget(plain, slots=128), TransformersTarget(compiled, slots=128)


@pytest.mark.slow
def test_compiled_equals_plain(targets: tuple[TransformersTarget, TransformersTarget]) -> None:
    plain, compiled = targets
    forward = compiled.model.model.forward
    assert isinstance(forward, CompiledForward)
    for expected, got in zip(passes(plain), passes(compiled), strict=True):
        assert expected.std() > 0.3
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.25)
    assert not forward.failed
    compiled.truncate([0], [20])
    plain.truncate([0], [20])


@pytest.mark.slow
def test_a_tokens_bits_do_not_depend_on_how_many_are_scored(
    targets: tuple[TransformersTarget, TransformersTarget],
) -> None:
    _, compiled = targets
    tokens = list(range(7, 22))
    whole = compiled.score([0], [tree(tokens)]).logits
    for count in (0, 1, 4, 7):
        part = compiled.score([0], [tree(tokens[:count])]).logits
        assert torch.equal(part, whole[:, : count + 1]), count


@pytest.mark.slow
def test_hidden_states_are_captured_as_before(targets: tuple[TransformersTarget, TransformersTarget]) -> None:
    plain, compiled = targets
    expected = plain.score([0], [tree([7, 8])], boundaries={1}).hidden_states[1]
    got = compiled.score([0], [tree([7, 8])], boundaries={1}).hidden_states[1]
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.25)


def test_what_cannot_be_compiled_is_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not accelerate(build("llama", torch.float64), compile=True).compiled
    assert "folded" in caplog.text
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not accelerate(build("llama"), compile=True).compiled
    assert "C++" in caplog.text


@pytest.mark.parametrize("why", ["no such header", "attention function"])
def test_what_fails_or_keeps_the_cache_to_itself_falls_back(why: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = build("llama")
    changed = copy.deepcopy(plain)
    accelerate(changed, compile=True)
    forward = changed.model.forward

    def broken(ids: torch.Tensor, *_: Any) -> Any:
        if why == "no such header":
            raise RuntimeError(why)
        return forward.plain(input_ids=ids)

    forward.compiled = broken
    for expected, got in zip(
        passes(TransformersTarget(plain, slots=128)), passes(TransformersTarget(changed, slots=128)), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.25)
    assert why in caplog.text
