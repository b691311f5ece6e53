"""Faster forwards stand on the modules that they fit, change no answer, and step aside where they do not apply."""

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.core.tree import TokenTree
from forerun.model import TransformersTarget
from forerun.model.kernels import forwards, native, packing, products
from forerun.model.kernels.accelerate import accelerate, undo
from forerun.model.kernels.forwards import LayerForward, ModelForward
from forerun.model.kernels.module_forwards import AttentionForward, GatedForward, NormForward
from forerun.model.kernels.native import Layers
from model_kernels.conftest import COMMON

pytestmark = pytest.mark.usefixtures("in_c", "packed")


def small(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, "head_dim": 32, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (0.1 if weight.dim() > 1 else 0.3) + (weight.dim() == 1))
    return model


IDS = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(0))


def kinds(model: nn.Module) -> set[type]:
    return {type(module.__dict__["forward"]) for module in model.modules() if "forward" in module.__dict__}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_answers_stay(family: str) -> None:
    plain = small(family, **({"sliding_window": 8} if family == "mistral" else {}))
    faster = copy.deepcopy(plain)
    assert accelerate(faster).forwards == sum(1 for _ in faster.modules() if "forward" in _.__dict__) > 0
    assert kinds(faster) == {NormForward, GatedForward, AttentionForward, LayerForward, ModelForward}
    ids = torch.randint(3, 128, (2, 20))
    with torch.inference_mode():
        expected = plain(input_ids=ids).logits
        torch.testing.assert_close(faster(input_ids=ids).logits, expected, rtol=0.05, atol=0.1 * expected.std().item())
    answers = []
    for model in (plain, faster):
        target = TransformersTarget.load(model, rows=2, slots=32)
        target.prefill([0, 1], [ids[0, :13].tolist(), ids[1].tolist()])
        answers.append(target.score([1, 0], [TokenTree(5), TokenTree(7)]).logits)
    torch.testing.assert_close(answers[1], answers[0], rtol=0.05, atol=0.1 * answers[0].std().item())


def test_other_kinds_keep_their_own() -> None:
    """Gemma's norm multiplies by 1 + weight, its MLP has another activation, its attention a soft cap."""
    model = small("gemma2", sliding_window=8, query_pre_attn_scalar=16)
    packing.pack(model)
    assert forwards.install(model, IDS) == 0
    model = small("llama", head_dim=16)
    assert accelerate(model).folded_attention
    assert kinds(model) == {NormForward, GatedForward}


SOME_OR_ALL = [("some", size) for size in (1.0, 40.0, 1700.0)] + [("all", size) for size in (32.0, 64.0, 256.0)]


@pytest.mark.parametrize(("how_many", "size"), SOME_OR_ALL)
def test_a_norm_that_adds_one_to_its_weight(how_many: str, size: float, caplog: pytest.LogCaptureFixture) -> None:
    """However large its weights are: the kernel that forgets the 1 + differs where some are small, and where all are
    large by a few units of rounding, of every value in the same direction."""
    model = small("gemma2", sliding_window=8, query_pre_attn_scalar=16)
    norms = [module for module in model.modules() if NormForward.suits(module)]
    assert len(norms) == 9
    for norm in norms:
        if how_many == "some":
            norm.weight.data[::16] = size
        else:
            norm.weight.data.uniform_(size, 1.5 * size)
    with caplog.at_level(logging.DEBUG):
        assert forwards.install(model, IDS) == 0
    assert "model.layers.1.input_layernorm (Gemma2RMSNorm) keeps its forward: the faster one differs by" in caplog.text


def _swap_heads(made: Any) -> None:
    made.joint = copy.copy(made.joint)
    apply, (queries, keys, _) = made.joint.apply, made.joint.sizes

    def swapped(states: torch.Tensor) -> torch.Tensor:
        result = apply(states)
        result[..., queries : queries + keys] = result[..., queries : queries + keys].roll(32, -1)
        return result

    made.joint.apply = swapped


def _swap_halves(made: Any) -> None:
    made.joint = copy.copy(made.joint)
    apply = made.joint.apply
    made.joint.apply = lambda states: torch.cat(apply(states).chunk(2, -1)[::-1], -1)


WRONG: dict[str, tuple[type, Any]] = {
    "epsilon x 100": (NormForward, lambda made: setattr(made, "epsilon", 100 * made.epsilon)),
    "a KV head swapped": (AttentionForward, _swap_heads),
    "no head norm": (AttentionForward, lambda made: setattr(made, "heads", replace(made.heads, query_norm=None))),
    "gate and up swapped": (GatedForward, _swap_halves),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_forward_with_a_fault_is_put_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault in turn, on a model whose other modules are replaced all the same."""
    kind, damage = WRONG[fault]
    made, right = kind.__init__, {NormForward, GatedForward, AttentionForward} - {kind}

    def damaged(self: Any, module: Any) -> None:
        made(self, module)
        damage(self)

    monkeypatch.setattr(kind, "__init__", damaged)
    model = small("qwen3")
    accelerate(model, ids=IDS[0].tolist())
    assert kinds(model) == right


def test_what_was_replaced_is_put_back() -> None:
    model = small("qwen3")
    plain = copy.deepcopy(model)
    assert list(undo(model)) == []
    accelerate(model)
    assert len(list(undo(model))) == 3
    assert not kinds(model) and model.config._attn_implementation == "sdpa"
    with torch.inference_mode():
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_gradients_and_other_caches_take_the_modules_own() -> None:
    plain = small("llama")
    faster = copy.deepcopy(plain)
    accelerate(faster)
    ids = torch.randint(3, 128, (1, 9))
    wanted, found = (
        model.generate(ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
        for model in (plain, faster)
    )
    torch.testing.assert_close(found.logits[0], wanted.logits[0], rtol=0.05, atol=0.1 * wanted.logits[0].std().item())
    states = torch.randn(1, 4, 64).bfloat16().requires_grad_()
    faster.model.norm(states).float().square().sum().backward()
    assert states.grad is not None and float(states.grad.abs().max()) > 0


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("names", [*([name] for name in PROJECTIONS), ["q_proj", "gate_proj"]], ids="+".join)
def test_a_replaced_projection_is_not_bypassed(names: list[str]) -> None:
    """`quantized_self` and adapters put other layers where the packed ones stood; an adapter may stand on one alone."""
    model = small("llama")
    accelerate(model)
    target = TransformersTarget.load(model, rows=2, slots=16)
    target.prefill([0], [[5, 6, 7]])
    before = target.score([0], [TokenTree(8)]).logits
    for layer in model.model.layers:
        for name in names:
            parent = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            old = getattr(parent, name)
            setattr(parent, name, nn.Linear(old.in_features, old.out_features, bias=False, dtype=torch.bfloat16))
    target.prefill([1], [[5]])  # A prompt is when a model is looked at
    assert not torch.equal(target.score([0], [TokenTree(8)]).logits, before)


FAMILIES: dict[str, dict[str, Any]] = {
    **{"llama": {"attention_bias": True}, "mistral": {"sliding_window": 8}, "qwen2": {}},
    "qwen3": {"num_key_value_heads": 1},
}


def whole_layers(model: Any) -> list[LayerForward]:
    found = [layer.__dict__.get("forward") for layer in model.model.layers]
    return [each for each in found if isinstance(each, LayerForward)]


def logits_of_steps(model: Any) -> list[torch.Tensor]:
    """Prompts, a tree and chains, of several rows, unequal and more than the cache had room for at first."""
    target = TransformersTarget(model, rows=4, slots=120)
    found = [target.prefill([0, 2], [list(range(3, 25)), [9, 8, 7]]).logits]
    for rows in ([0, 2], [2], [0], [2, 0], [0, 2]):
        trees = [TokenTree(row + 3) for row in rows]
        for number, tree in enumerate(trees):
            tree.add_path(range(4, 4 + 9 * number))
            tree.add_path([7, 5])
        found.append(target.score(rows, trees).logits)
        target.commit(rows, [(1,) for _ in rows])
    found.append(target.prefill([1], [[100 - token for token in range(70)]]).logits)
    return found


def assert_the_bits_of_the_parts(model: Any, *, layers: int) -> None:
    """Accelerate a model; all its layers become whole ones, and give what their parts give without them."""
    accelerate(model)
    assert len(whole_layers(model)) == layers
    found = logits_of_steps(model)
    for layer in model.model.layers:
        del layer.forward
    assert all(map(torch.equal, found, logits_of_steps(model)))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, "widened"], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_has_its_parts_bits(family: str, kind: torch.dtype | str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "widened":
        monkeypatch.setattr(products, "kind_of", lambda _: products.ProductKind.WIDENED)
    model = small(family, **FAMILIES[family]).to(kind if isinstance(kind, torch.dtype) else torch.bfloat16)
    assert_the_bits_of_the_parts(model, layers=2)


def test_layers_of_unequal_width_have_the_bits_of_their_parts() -> None:
    """Their queries lie in other places, and attention is asked once for all that ask alike."""
    model = small("llama", num_hidden_layers=3)
    torch.manual_seed(1)
    for name, sizes in (("gate_proj", (256, 64)), ("up_proj", (256, 64)), ("down_proj", (64, 256))):
        wide = nn.Linear(sizes[1], sizes[0], bias=False, dtype=torch.bfloat16).requires_grad_(False)
        setattr(model.model.layers[1].mlp, name, wide)
    assert_the_bits_of_the_parts(model, layers=3)


def changed(values: Any) -> Any:
    """Other values of the same shape: of a tensor, or of the first tensor in a tuple or dict."""
    if isinstance(values, torch.Tensor):
        return values * 1.5 + 0.25 if values.is_floating_point() else values // 2
    if isinstance(values, dict):
        name = next(name for name, value in values.items() if isinstance(value, torch.Tensor))
        return {**values, name: changed(values[name])}
    return (changed(values[0]), *values[1:])


class Changed(nn.Module):
    """Takes the place of a module and changes what it returns."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return changed(self.real(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("real", "training") else getattr(self.real, name)


def change_its_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return (changed(args), kwargs) if args else (args, changed(kwargs))


@contextmanager
def hook(model: nn.Module, name: str) -> Iterator[None]:
    with model.get_submodule(name).register_forward_hook(lambda *given: changed(given[-1])):
        yield


@contextmanager
def pre_hook(model: nn.Module, name: str) -> Iterator[None]:
    with model.get_submodule(name).register_forward_pre_hook(change_its_inputs, with_kwargs=True):
        yield


@contextmanager
def global_hook(model: nn.Module, name: str) -> Iterator[None]:
    own = model.get_submodule(name)
    with register_module_forward_hook(lambda module, _, found: changed(found) if module is own else None):
        yield


@contextmanager
def global_pre_hook(model: nn.Module, name: str) -> Iterator[None]:
    own = model.get_submodule(name)
    with register_module_forward_pre_hook(lambda module, args: changed(args) if module is own and args else None):
        yield


@contextmanager
def patch(model: nn.Module, name: str) -> Iterator[None]:
    module = model.get_submodule(name)
    real, before = module.forward, module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: changed(real(*args, **kwargs))
    yield
    del module.forward
    if before is not None:
        module.forward = before


@contextmanager
def exchange(model: nn.Module, name: str) -> Iterator[None]:
    owner, _, last = name.rpartition(".")
    children, real = model.get_submodule(owner)._modules, model.get_submodule(name)
    children[last] = Changed(real)
    yield
    children[last] = real


CHANGES = [hook, pre_hook, global_hook, global_pre_hook, patch, exchange]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_inside_is_bypassed(dtype: torch.dtype, change: Any) -> None:
    """Each module in turn is changed between two prompts of one target, in whole layers and in their parts alone."""
    plain = small("qwen3").to(dtype)
    whole = copy.deepcopy(plain)
    accelerate(whole)
    assert kinds(whole) == {NormForward, GatedForward, AttentionForward, LayerForward, ModelForward}
    parts = copy.deepcopy(whole)
    for module in (parts.model, *parts.model.layers):
        del module.forward
    models = [plain, whole, parts]
    targets = [TransformersTarget(model, rows=2, slots=32) for model in models]
    names = [name for name, module in plain.named_modules() if name.startswith("model.") and "layers.0" not in name]
    names.remove("model.layers")  # A list, which is never called

    def answers() -> list[torch.Tensor]:
        for target in targets:
            target.truncate([0], [0])
            target.prefill([0], [IDS[0, :8].tolist()])
        return [target.score([0], [TokenTree(7)]).logits for target in targets]

    before = answers()[0]
    assert len(names) == 18
    for name in names:
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(change(model, name))
            expected, *found = answers()
        unread = {pre_hook: ("rotary_emb",), global_pre_hook: ("rotary_emb", "self_attn")}  # By keywords, or not at all
        if not name.endswith(unread.get(change, ("-",))):
            assert not torch.allclose(expected, before, rtol=0.05, atol=0.02), f"{name}: the change shows"
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0.05, atol=0.1 * before.std().item(), msg=name)
    torch.testing.assert_close(answers()[0], before)


def test_states_at_a_boundary_are_kept() -> None:
    """The states that a pass hands out are not overwritten by its other layers, nor by the next pass."""
    model = small("llama", num_hidden_layers=3)
    accelerate(model)
    assert len(whole_layers(model)) == 3
    target = TransformersTarget(model, rows=1, slots=64)
    target.prefill([0], [[3, 4, 5]])
    found = target.score([0], [TokenTree(6)], boundaries=frozenset({1, 2, 3})).hidden_states
    kept = {boundary: value.clone() for boundary, value in found.items()}
    target.score([0], [TokenTree(9)])
    assert len({value.data_ptr() for value in found.values()}) == 3
    assert all(torch.equal(found[boundary], kept[boundary]) for boundary in kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("boundaries", [(), (0,), (1, 3), (0, 1, 2, 3, 4)], ids=str)
def test_layers_in_one_call_have_the_bits_of_layers_one_by_one(boundaries: tuple[int, ...], dtype: torch.dtype) -> None:
    """Boundaries are captured on the way, at their edges and between the layers."""
    model = small("llama", num_hidden_layers=4).to(dtype)
    accelerate(model)
    base: Any = model.model
    assert type(base.forward) is ModelForward

    def states() -> list[torch.Tensor]:
        target = TransformersTarget(model, rows=2, slots=64)
        found = [target.prefill([0, 1], [[3, 4, 5], [9, 8, 7, 6]], boundaries=frozenset(boundaries))]
        found.append(target.score([1, 0], [TokenTree(6), TokenTree(7)], boundaries=frozenset(boundaries)))
        return [part for one in found for part in (one.logits, *one.hidden_states.values())]

    together = states()
    del base.forward
    assert all(map(torch.equal, together, states()))


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the tokens of each native call over whole layers."""
    tokens, run = list[int](), Layers.run

    def counted(self: Layers, states: torch.Tensor, *others: Any) -> list[torch.Tensor]:
        tokens.append(states.shape[:-1].numel())
        return run(self, states, *others)

    monkeypatch.setattr(Layers, "run", counted)
    return tokens


def test_a_pass_that_captures_boundaries_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another hook on a layer is called, and splits the pass."""
    if not native.takes_attention(*[torch.zeros(1, 1, 1, 32).bfloat16()] * 4):
        pytest.skip("attention runs in torch here")
    model, watched = small("llama", num_hidden_layers=4), list[nn.Module]()
    accelerate(model)
    target = TransformersTarget(model, rows=1, slots=64)
    target.prefill([0], [[3, 4, 5]])
    plain = target.score([0], [TokenTree(6)]).logits
    runs = count_runs(monkeypatch)
    captured = target.score([0], [TokenTree(6)], boundaries=frozenset({0, 1, 3, 4}))
    assert runs == [1]
    assert torch.equal(captured.logits, plain)
    model.model.layers[1].register_forward_hook(lambda layer, *_: watched.append(layer))
    again = target.score([0], [TokenTree(6)], boundaries=frozenset({0, 1, 3, 4}))
    assert watched == [model.model.layers[1]]
    assert runs == [1, 1, 1, 1]  # As before, then the layer before it, itself, and those behind it
    for boundary, states in captured.hidden_states.items():
        assert torch.equal(again.hidden_states[boundary], states)


def test_rows_of_unequal_size_run_in_one_call_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.takes_attention(*[torch.zeros(1, 1, 1, 32).bfloat16()] * 4):
        pytest.skip("attention runs in torch here")
    model = small("llama")
    accelerate(model)
    tokens = count_runs(monkeypatch)
    target = TransformersTarget(model, rows=3, slots=64)
    target.prefill([0, 1, 2], [[3, 4, 5], [9], [8, 7]])
    target.score([0, 1, 2], [TokenTree.of(6, [7, 8, 9], [0, 1, 2]), TokenTree(5), TokenTree(4)])
    assert tokens == [6, 6]


def test_a_model_that_does_more_than_run_its_layers_keeps_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaModel.forward

    def doubled(self: Any, **kwargs: Any) -> Any:
        found = plain(self, **kwargs)
        found.last_hidden_state = 2 * found.last_hidden_state
        return found

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", doubled)
    model = small("llama")
    accelerate(model)
    assert LayerForward in kinds(model) and ModelForward not in kinds(model)


def test_copies_of_layers_run_for_themselves() -> None:
    model = small("qwen2")
    accelerate(model)
    before = logits_of_steps(model)
    twin = copy.deepcopy(model)
    with torch.inference_mode():
        twin.model.layers[0].input_layernorm.weight.zero_()
    changed = logits_of_steps(twin)
    assert not torch.equal(changed[0], before[0])
    assert all(map(torch.equal, logits_of_steps(model), before))


@pytest.mark.parametrize(("parts", "whole"), [(5.2, 3.9), (3.9, 5.2)])
def test_whole_layers_stay_on_a_gpu_if_faster(parts: float, whole: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: Any = [SimpleNamespace(device=torch.device("cuda"))]
    monkeypatch.setattr(forwards, "time_layers", lambda _layers, tokens: (parts, whole + tokens / 100))
    assert forwards.are_faster(layers) is (whole < parts)
    monkeypatch.undo()
    assert not forwards.are_faster(layers), "what cannot be timed is not used"
    monkeypatch.setenv(forwards.LAYERS_BY, "whole")
    assert forwards.are_faster(layers)
