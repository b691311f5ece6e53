"""The simulated device refuses and counts what it should: a fault of each kind, planted, is found."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forerun.core.tree import TokenTree, fetch_masses
from forerun.model.recordings import Recordings
from forerun.types import Drawn
from simulated.device import NAME, Counts, DeviceError, DeviceTensor, Kind, SimulatedDevice, moved


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice(source="/tests/simulated/test_") as opened, torch.inference_mode():
        yield opened


def there(count: int = 4) -> Tensor:
    """(count,) float32 0, 1, 2... on the device."""
    return torch.arange(count, device=NAME).float()


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda d, c: d + c,
    "add in place": lambda d, c: d.add_(c),
    "where": lambda d, c: torch.where(d > 0, d, c),
    "cat": lambda d, c: torch.cat([d, c]),
    "stack": lambda d, c: torch.stack([c, d]),
    "matmul": lambda d, c: d @ c,
    "linear": lambda d, c: nn.functional.linear(d, c.expand(2, 4)),
    "gather by a CPU index": lambda d, c: d.gather(0, torch.tensor([0])),
    "index_select by a CPU index": lambda d, c: d.index_select(0, torch.tensor([0])),
    "embedding of CPU ids": lambda d, c: nn.functional.embedding(torch.tensor([0]), d.view(4, 1)),
    "masked_fill by a CPU mask": lambda d, c: d.masked_fill(c > 0, 0.0),
    "a CPU number in an index_select": lambda d, c: d.index_select(0, torch.tensor(0)),
    "attention with a CPU mask": lambda d, c: nn.functional.scaled_dot_product_attention(
        *[d.view(1, 4, 1)] * 3, attn_mask=c.expand(4, 4) > 0
    ),
}


@pytest.mark.parametrize("work", MIXED.values(), ids=MIXED.keys())
def test_tensors_of_two_devices_do_not_mix(device: SimulatedDevice, work: Callable[[Tensor, Tensor], Any]) -> None:
    d, c = there(), torch.zeros(4)
    with pytest.raises(DeviceError, match="on the same device, found sim:0 and cpu"):
        work(d, c)
    assert len(device.refused) == 1 and "at device.py:" in device.refused[0]


def test_numpy_is_refused(device: SimulatedDevice) -> None:
    with pytest.raises(TypeError, match="can't convert sim:0"):
        there().numpy()


def test_a_tensor_is_of_no_use_where_the_device_is_not_open() -> None:
    with SimulatedDevice():
        d = there()
    with pytest.raises(DeviceError, match="not open"):
        d + 1


COUNTED: dict[str, tuple[Callable[[Tensor], Any], Kind]] = {
    "item": (lambda d: d.sum().item(), Kind.READ),
    "float": (lambda d: float(d.sum()), Kind.READ),
    "int": (lambda d: int(d[1]), Kind.READ),
    "if": (lambda d: 1 if d.any() else 0, Kind.READ),
    "comparison in max": (lambda d: max(d[0], d[1]), Kind.READ),
    "tolist": (lambda d: d.tolist(), Kind.READ),
    "numpy": (lambda d: d.cpu().numpy(), Kind.READ),
    "cpu": (lambda d: d.cpu(), Kind.READ),
    "to the CPU, not blocking": (lambda d: d.to("cpu", non_blocking=True), Kind.READ),
    "copy into a CPU tensor": (lambda d: torch.zeros(4).copy_(d), Kind.READ),
    "equal": (lambda d: torch.equal(d, d), Kind.READ),
    "allclose": (lambda d: torch.allclose(d, d), Kind.READ),
    "nonzero": (lambda d: d.nonzero(), Kind.READ),
    "where of one": (lambda d: torch.where(d > 1), Kind.READ),
    "boolean index": (lambda d: d[d > 1], Kind.READ),
    "boolean index, written": (lambda d: d.index_put_((d > 1,), torch.ones(2, device=NAME)), Kind.READ),
    "masked_select": (lambda d: d.masked_select(d > 1), Kind.READ),
    "unique": (lambda d: d.unique(), Kind.READ),
    "repeats": (lambda d: d.repeat_interleave(d.long()), Kind.READ),
    "slice by a tensor": (lambda d: d[: d[2].long()], Kind.READ),
    "to": (lambda d: torch.zeros(4).to(NAME), Kind.BLOCKING_WRITE),
    "torch.tensor": (lambda d: torch.tensor([1, 2], device=NAME), Kind.BLOCKING_WRITE),
    "as_tensor": (lambda d: torch.as_tensor([1, 2], device=NAME), Kind.BLOCKING_WRITE),
    "copy from a CPU tensor": (lambda d: d.copy_(torch.zeros(4)), Kind.BLOCKING_WRITE),
    "assignment of a CPU tensor": (lambda d: d.__setitem__(slice(0, 2), torch.zeros(2)), Kind.BLOCKING_WRITE),
    "list index": (lambda d: d[[0, 2]], Kind.BLOCKING_WRITE),
    "CPU index": (lambda d: d[torch.tensor([0, 2])], Kind.BLOCKING_WRITE),
    "CPU index, set": (lambda d: d.index_put_((torch.tensor([0]),), torch.ones(1, device=NAME)), Kind.BLOCKING_WRITE),
    "pinned, blocking": (lambda d: torch.zeros(4).pin_memory().to(NAME), Kind.BLOCKING_WRITE),
    "pinned, not blocking": (lambda d: torch.zeros(4).pin_memory().to(NAME, non_blocking=True), Kind.STAGED),
    "made pinned, not blocking": (lambda d: d.copy_(torch.zeros(4, pin_memory=True), non_blocking=True), Kind.STAGED),
}


@pytest.mark.parametrize(("work", "kind"), COUNTED.values(), ids=COUNTED.keys())
def test_a_hidden_transfer_is_counted(device: SimulatedDevice, work: Callable[[Tensor], Any], kind: Kind) -> None:
    d = there()
    with device.counting() as counts:
        work(d)
    assert [event.kind for event in counts.events] == [kind]
    assert counts.of(kind) == 1 and counts.events[0].site.startswith("device.py:")


FREE: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic with numbers": lambda d: (d + 1) * 2 > torch.tensor(3.0),
    "made there": lambda d: (torch.zeros(3, device=NAME), torch.full((2,), 7.0, device=NAME), d.new_ones(2)),
    "attention": lambda d: nn.functional.scaled_dot_product_attention(*[d.view(1, 4, 1)] * 3, is_causal=True),
    "index on the device": lambda d: d[torch.arange(2, device=NAME)],
    "a mask filled with one number": lambda d: d.__setitem__(d > 1, 0.0),
    "slices": lambda d: d[1:].view(3, 1).expand(3, 2).T,
    "sampling": lambda d: torch.searchsorted(d.softmax(-1).cumsum(-1), d[:1]),
    "to where it is": lambda d: d.to(NAME),
    "another dtype": lambda d: d.to(torch.int64),
    "sizes": lambda d: (len(d), d.shape, d.dtype, d.device, d.is_floating_point()),
    "on the CPU": lambda d: torch.zeros(3).nonzero().tolist(),
    "made on the CPU": lambda d: d.new_zeros(2, device="cpu") + torch.zeros(2),
}


@pytest.mark.parametrize("work", FREE.values(), ids=FREE.keys())
def test_what_does_not_wait_counts_nothing(device: SimulatedDevice, work: Callable[[Tensor], Any]) -> None:
    d = there()
    with device.counting() as counts:
        work(d)
    assert not counts.events and not device.refused


def test_each_count_has_its_own_events(device: SimulatedDevice) -> None:
    d = there()
    with device.counting() as outer:
        float(d[0])
        with device.counting() as inner:
            d.tolist()
            torch.zeros(1).to(NAME)
        float(d[1])
    assert (outer.of(Kind.READ), outer.of(Kind.BLOCKING_WRITE)) == (2, 0)
    assert (inner.of(Kind.READ), inner.of(Kind.BLOCKING_WRITE)) == (1, 1)
    assert isinstance(outer, Counts) and not device.counts.events


@pytest.mark.parametrize(
    "work",
    [
        lambda d: d.double(),
        lambda d: d.sum(dtype=torch.float64),
        lambda d: torch.zeros(2, dtype=torch.float64, device=NAME),
        lambda d: torch.zeros(2, dtype=torch.float64).to(NAME),
        lambda d: torch.tensor([0.5], dtype=torch.float64, device=NAME),
    ],
    ids=["double", "sum", "zeros", "to", "tensor"],
)
def test_a_dtype_that_the_device_lacks_is_refused(work: Callable[[Tensor], Any]) -> None:
    with SimulatedDevice() as whole:
        work(there())
        assert not whole.refused
    with SimulatedDevice(lacks=[torch.float64]) as device, torch.inference_mode():
        with pytest.raises(TypeError, match=r"the device has no torch\.float64"):
            work(there())
        assert len(device.refused) == 1
        assert there().cpu().double().dtype is torch.float64, "the CPU has it"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 9)).eval()


def test_values_are_those_of_the_cpu(device: SimulatedDevice) -> None:
    model, ids = network(), torch.tensor([[1, 5, 3], [8, 0, 2]])
    on_device = moved(model)(ids.to(NAME))
    assert isinstance(on_device, DeviceTensor) and on_device.device == torch.device(NAME, 0)
    assert torch.equal(on_device.cpu(), model(ids))
    values, places = on_device.softmax(-1).topk(3)
    expected = model(ids).softmax(-1).topk(3)
    assert torch.equal(values.cpu(), expected.values) and places.tolist() == expected.indices.tolist()


def test_views_share_memory(device: SimulatedDevice) -> None:
    d = there(6)
    d.view(2, 3)[1, 1:] = 9.0
    d[:2].add_(torch.tensor(5.0))
    assert d.tolist() == [5, 6, 2, 3, 9, 9]
    assert d.view(2, 3).data_ptr() == d.data_ptr() != d.clone().data_ptr()


def test_a_change_of_shape_in_place_is_not_simulated(device: SimulatedDevice) -> None:
    with pytest.raises(NotImplementedError, match="changes no shape in place"):
        there().unsqueeze_(0)


def test_a_moved_model_is_a_copy_whose_tied_weights_stay_tied(device: SimulatedDevice) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(1))

    model = Tied()
    made = moved(model)
    assert made.embed.weight is made.head.weight and made.embed.weight.device.type == NAME
    assert made.scale.device.type == NAME
    assert model.embed.weight.device.type == "cpu" and not isinstance(model.scale, DeviceTensor)


def test_a_recording_replays_what_was_launched(device: SimulatedDevice) -> None:
    memory = torch.zeros(4, device=NAME)
    runs = list[int]()

    def work(x: Tensor) -> dict[str, Tensor]:
        runs.append(1)
        memory[1:3] += x[:2]
        doubled = x * 2
        return {"top": doubled.topk(2).values, "total": doubled.view(2, 2).sum(1)}

    replay = device.record(work, (there(),))
    launched, before = len(runs), memory.clone()
    first = replay(there())
    assert first["top"].tolist() == [6, 4] and first["total"].tolist() == [2, 10]
    second = replay(there() + 10)
    assert second["top"].tolist() == [26, 24] and first["top"] is second["top"]
    assert (memory - before).tolist() == [0, 10, 12, 0], "twice x[:2]: 0 and 10, 1 and 11"
    assert len(runs) == launched, "a replay runs no Python"


def test_a_recording_keeps_what_the_host_knew(device: SimulatedDevice) -> None:
    """As a CUDA graph does: a number that changes on the host must not be part of what is recorded."""
    state = {"offset": 1}
    replay = device.record(lambda x: x + state["offset"], (there(2),))
    state["offset"] = 100
    assert replay(there(2)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda x: x + float(x.sum()), "read"),
        (lambda x: x[x > 1], "read"),
        (lambda x: x + torch.tensor([1.0], device=NAME), "blocking write"),
        (lambda x: x[[0, 1]], "blocking write"),
        (lambda x: x + torch.ones(1).pin_memory().to(NAME, non_blocking=True), "staged copy"),
    ],
    ids=["float", "mask", "tensor", "list index", "staged"],
)
def test_a_wait_in_a_recording_is_refused(device: SimulatedDevice, work: Callable[[Tensor], Any], kind: str) -> None:
    work(there())
    with pytest.raises(DeviceError, match=f"a {kind} while work is recorded"):
        device.record(work, (there(),))
    work(there())  # and afterwards it may wait again


def test_a_key_is_recorded_when_it_has_come_often_enough(device: SimulatedDevice) -> None:
    """Keys that come once or twice, and of which there are many, push no other out."""
    recordings, runs = Recordings(device.record), list[int]()

    def work(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    for turn in range(6):
        assert recordings.run("often", work, there() + turn, after=3).tolist() == ((there() + turn) * 2).tolist()
        assert recordings.run(("seldom", turn), work, there(), after=3).tolist() == [0, 2, 4, 6]
    assert list(recordings._known) == ["often"]
    assert len(runs) == 3 + 2 + 6, "three times as it comes, twice to record, then never"
    recordings.most = 1
    recordings.run("other", work, there())
    assert list(recordings._known) == ["other"]


def test_launches_are_counted_but_not_those_of_a_replay(device: SimulatedDevice) -> None:
    replay, given = device.record(lambda x: (x * 2).view(2, 2).sum(1), (there(),)), there()
    with device.counting() as count:
        replay(given)
        (given + 1).view(2, 2)
    assert count.launches == 2, "what the recording is given, and the sum; a view is none"


def test_other_code_sees_no_accelerator() -> None:
    with SimulatedDevice():
        assert torch.accelerator.is_available()
        with SimulatedDevice():
            pass
        assert torch.accelerator.is_available()
    assert not getattr(torch, NAME).is_available() and getattr(torch, NAME).device_count() == 0
    assert torch.get_default_device().type == "cpu" and torch.tensor([1.0]).device.type == "cpu"
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3, 3]


def test_the_check_of_what_was_drawn_is_one_read(device: SimulatedDevice) -> None:
    tree = TokenTree(0)
    tree.set_probs(0, torch.arange(3, device=NAME) / 4)
    tree.add(2, 0, drawn=Drawn.IID)
    tree.add(0, 0, drawn=Drawn.IID)
    with device.counting() as counts:
        assert fetch_masses([TokenTree(0), tree]) == {1: 2}
    assert (counts.of(Kind.READ), counts.of(Kind.BLOCKING_WRITE)) == (1, 0) and tree.masses == {0: 0.75}
