"""What a step costs on a GPU beside what its memory allows: ``python -m benchmarks.gpu OUT [PART ...] [--dry]``.

Made for a GPU that is lent for minutes: parts come in order of worth, each is cut off at its own time limit, and all
take 12 minutes at most. A result is one JSON line, printed and appended to OUT/gpu.jsonl. ``--dry`` runs every part on
the CPU with a tiny model: it tries the script, its numbers mean nothing. No checkpoint is needed: the shape of
Llama-3.1-8B is filled with random numbers on the device, except for `texts`, which runs when it is named.

    ceiling    what memory moves, what a launch, a node of a graph and a round trip take
    step       time, kernels and drafting of a step: plain, suffix, EAGLE-3, a draft model, at T = 0 and 0.8
    without    the same with layers module by module, in a process of its own
    growth     a pass over nodes, rows and context
    peer       transformers on the same model, with a static cache, compiled
    quantised  the matrix products of a pass in bfloat16, FP8 and 4 bits
    tests      tests_cuda, on several processes
    texts      tokens per second of edits and files: the demo target enlarged to 8 B, and transformers' generate
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.devices import device_name
from forerun.model import TransformersTarget

DTYPE = torch.bfloat16
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
"""The shape of Llama-3.1-8B."""
DRAFT = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
"""What Llama-3.2-1B has of its own."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
CONTEXT = 1024
CHAIN = 5
REDUCED = 32_000  # Tokens of the head's vocabulary, as those of published EAGLE-3 heads
ROWS = (1, 8, 16)  # Of the products: a plain step, a chain, a tree
COPY_TB_S = 4.3  # What an H200 was seen to copy, where the part `ceiling` has not run
WITHOUT = {"FORERUN_LAYERS": "parts"}
"""The environment in which no whole layer runs in our kernels, of the part `without`."""


class CutError(Exception):
    """A part's time is up."""


@dataclass(kw_only=True)
class Bench:
    """Where it runs, where results go, and the models that parts share."""

    out: Path
    dry: bool
    began: float = field(default_factory=time.perf_counter)
    copy_tb_s: float = COPY_TB_S

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda", None if self.dry else 0)

    @property
    def shape(self) -> dict[str, Any]:
        return LARGE | TINY if self.dry else LARGE

    @property
    def context(self) -> int:
        return 64 if self.dry else CONTEXT

    def tell(self, part: str, **values: Any) -> None:
        """Print a result, and keep it."""
        found = {"part": part, "at_s": round(time.perf_counter() - self.began, 1), **values}
        switched = {name: os.environ[name] for name in WITHOUT if name in os.environ}
        line = json.dumps(found | ({"environment": switched} if switched else {}), default=str)
        print(line, flush=True)  # noqa: T201
        with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def wait(self) -> None:
        """Wait for all that the device was given."""
        if not self.dry:
            torch.cuda.synchronize()

    def model(self, **changes: Any) -> Any:
        """Return a Llama of this shape with random weights on the device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        try:
            with self.device, torch.no_grad():
                config = LlamaConfig(**(self.shape | changes), bos_token_id=1, eos_token_id=2, pad_token_id=0)
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    @cached_property
    def target(self) -> Any:
        return self.model()

    @cached_property
    def llm(self) -> LLM:
        """One engine for all arms; each request names its drafter."""
        length = 512 if self.dry else 4096
        options: dict[str, Any] = {"tokenizer": False, "self_check": False, "max_num_seqs": 1}
        return LLM(self.target, repack=True, max_model_len=length, **options)

    @cached_property
    def arms(self) -> dict[str, dict[str, Any] | bool]:
        from forerun.heads.eagle import EagleConfig, EagleHead

        fixed = {"adaptive": False, "num_speculative_tokens": CHAIN}
        size = min(REDUCED, self.shape["vocab_size"] // 2)
        config = EagleConfig.for_target("eagle3", self.target, draft_vocab_size=size)
        head = EagleHead.initial(self.target, config, torch.arange(size))
        draft = self.model(**({"num_hidden_layers": 1} if self.dry else DRAFT))
        return {
            "plain": False,
            "suffix": {"method": "suffix", **fixed},
            "eagle3": {"method": "eagle3", "model": head.to(self.device, DTYPE).eval(), **fixed},
            "draft_model": {"method": "draft_model", "model": draft, **fixed},
        }

    def free(self) -> None:
        """Give up the models."""
        for name in ("llm", "arms", "target"):
            self.__dict__.pop(name, None)
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def milliseconds(self, work: Callable[[], Any], count: int = 20) -> float:
        """Return the median time of one call on the device, by its events."""
        for _ in range(1 if self.dry else 3):
            work()
        times = list[float]()
        for _ in range(2 if self.dry else count):
            if self.dry:
                began = time.perf_counter()
                work()
                times.append(1e3 * (time.perf_counter() - began))
                continue
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        return statistics.median(times)

    def recorded(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Return the work as one CUDA graph."""
        if self.dry:
            return work
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
            work()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            work()

        def replay() -> None:
            graph.replay()
            _ = work  # What it reads must live as long

        return replay


def ceiling(bench: Bench) -> None:
    """Measure what memory moves, and what a launch, a node of a graph and a round trip take."""
    size = 1 << (20 if bench.dry else 32)
    first, second = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    words = first.view(torch.int64)
    copy = 2 * size / bench.milliseconds(partial(second.copy_, first), 10) / 1e9
    read = size / bench.milliseconds(words.sum, 10) / 1e9
    bench.copy_tb_s = copy
    del first, second, words
    values, calls, nodes = torch.zeros(128, device=bench.device), 50 if bench.dry else 2000, 500
    began = time.perf_counter()
    for _ in range(calls):
        values.add_(1)
    launch = (time.perf_counter() - began) / calls
    bench.wait()

    def many() -> None:
        for _ in range(nodes):
            values.add_(1)

    replay = bench.recorded(many)
    node = bench.milliseconds(replay) / nodes
    began = time.perf_counter()
    replay()
    host = time.perf_counter() - began
    bench.wait()
    trips = list[float]()
    for _ in range(100):
        began = time.perf_counter()
        values.add_(1)[:1].cpu()
        trips.append(time.perf_counter() - began)
    bench.tell(
        "ceiling",
        device=device_name(bench.device),
        torch=torch.__version__,
        copy_tb_s=copy,
        read_tb_s=read,
        launch_us=1e6 * launch,
        graph_node_us=1e3 * node,
        replay_of_500_nodes_on_host_us=1e6 * host,
        round_trip_us=1e6 * statistics.median(trips),
    )


@dataclass(kw_only=True, slots=True)
class Steps:
    """The steps of one request."""

    walls: list[float] = field(default_factory=list)  # ms
    drafts: list[float] = field(default_factory=list)  # ms of them in which the host waits for a draft
    tokens: int = 0


def run_steps(bench: Bench, arm: str, temperature: float, tokens: int) -> Steps:
    """Answer one prompt of the context's length, and time each step behind it."""
    ids = [3 + (7 * place) % 400 for place in range(bench.context // 8)] * 8
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=1, detokenize=False)
    bench.llm.submit({"prompt_token_ids": ids}, params, speculative=bench.arms[arm], trace=True, cache_salt=str(tokens))
    found = Steps()
    while bench.llm.engine.busy:
        began = time.perf_counter()
        chunks = bench.llm.engine.step()
        took = 1e3 * (time.perf_counter() - began)
        traces = [chunk.trace for chunk in chunks if chunk.trace is not None]
        if traces:  # The prompt's pass has none
            found.walls.append(took)
            found.drafts.append(traces[0].draft_ms)
            found.tokens += sum(len(chunk.tokens) for chunk in chunks)
    return found


def count_kernels(bench: Bench, arm: str, temperature: float, tokens: int) -> dict[str, Any]:
    """Return kernels and their time, a step, by torch's profiler, and which take the most of it."""
    if bench.dry:
        run_steps(bench, arm, temperature, tokens)
        return {"kernels": 0.0, "kernel_ms": 0.0, "top": []}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps = len(run_steps(bench, arm, temperature, tokens).walls)
        bench.wait()
    found = [entry for entry in profiler.key_averages() if entry.self_device_time_total]
    found.sort(key=lambda entry: -entry.self_device_time_total)
    top = [(entry.key[:70], entry.count / steps, entry.self_device_time_total / 1e3 / steps) for entry in found[:12]]
    return {
        "kernels": sum(entry.count for entry in found) / steps,
        "kernel_ms": sum(entry.self_device_time_total for entry in found) / 1e3 / steps,
        "top": top,
    }


def step(bench: Bench) -> None:
    """Measure a step of each arm: wall time, drafting, kernels, and the share of what memory allows."""
    weights = sum(weight.nbytes for weight in bench.target.parameters())
    table = bench.target.get_input_embeddings().weight.nbytes  # Of which a step reads a row
    limit = (weights - table) / bench.copy_tb_s / 1e9
    plain = dict[float, dict[str, Any]]()
    for temperature in (0.0, 0.8):
        for arm in bench.arms:
            few, some = (4, 8) if bench.dry else (24, 96)
            run_steps(bench, arm, temperature, some)
            timed = run_steps(bench, arm, temperature, some + 1)
            found = {
                "wall_ms": statistics.median(timed.walls),
                "draft_ms": statistics.median(timed.drafts),
                "tokens_a_step": timed.tokens / len(timed.walls),
                **count_kernels(bench, arm, temperature, few),
            }
            base = plain.setdefault(temperature, found)
            more = {"limit_ms": limit, "share_of_limit": limit / found["wall_ms"]}
            more["drafting_over_pass"] = (found["wall_ms"] - base["wall_ms"]) / base["wall_ms"]
            more["host_not_hidden_ms"] = found["wall_ms"] - found["kernel_ms"]
            bench.tell("step", arm=arm, temperature=temperature, **found, **more)


def without(bench: Bench) -> None:
    """Run `step` without whole layers in our kernels."""
    bench.free()
    run_module(bench, ["step"], WITHOUT)


def run_module(bench: Bench, parts: Sequence[str], environment: dict[str, str]) -> None:
    """Run parts in a process of their own, which writes to the same file."""
    command = [sys.executable, "-m", "benchmarks.gpu", str(bench.out), *parts, *(["--dry"] if bench.dry else [])]
    with subprocess.Popen(command, env=os.environ | environment) as process:
        try:
            process.wait()
        finally:
            process.kill()


def growth(bench: Bench) -> None:
    """Measure a pass with its argmax on the host, by nodes, rows and context."""
    bench.llm  # noqa: B018, the model's modules are made faster
    plans = {(1, 33_000): [(1, nodes, context) for context in (1_000, 8_000, 32_000) for nodes in (1, 8, 16, 32, 64)]}
    plans[64, 2_400] = [(rows, nodes, 1_000) for rows in (1, 4, 16, 64) for nodes in (1, 8)]
    if bench.dry:
        plans = {(4, 256): [(1, 1, 64), (1, 16, 64), (4, 8, 64)]}
    for (rows, slots), points in plans.items():
        target = TransformersTarget(bench.target, rows=rows, slots=slots)
        for used, nodes, context in points:
            trees = [TokenTree(5) for _ in range(used)]
            for tree in trees:
                tree.add_path(range(10, 9 + nodes))
            times = list[float]()
            for _ in range(3 if bench.dry else 9):
                target.truncate(range(used), [0] * used)
                for row in range(used):
                    target.lengths[row] = context
                began = time.perf_counter()
                with torch.inference_mode():
                    target.score(range(used), trees).logits.argmax(-1).tolist()
                    target.commit(range(used), [()] * used)
                times.append(1e3 * (time.perf_counter() - began))
            bench.tell("growth", rows=used, nodes=nodes, context=context, ms=statistics.median(times[2:]))
        del target
        gc.collect()


def peer(bench: Bench) -> None:
    """Measure transformers on the same model as fast as it goes, never its eager generate."""
    bench.free()
    model, tokens = bench.model(), 8 if bench.dry else 128
    ids = torch.randint(10, 400, (1, bench.context), device=bench.device)
    options: dict[str, Any] = {} if bench.dry else {"cache_implementation": "static"}
    for turn in range(3):
        bench.wait()
        began = time.perf_counter()
        model.generate(ids, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        bench.wait()
        speed = tokens / (time.perf_counter() - began)
        bench.tell("peer", what="transformers, static cache, compiled", turn=turn, tokens_per_second=speed)


def matrices(shape: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Return outputs, inputs and how often a pass has it, of each matrix."""
    hidden, between, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {
        "qkv": (hidden + 2 * keys, hidden, layers),
        "o": (hidden, hidden, layers),
        "gate_up": (2 * between, hidden, layers),
        "down": (hidden, between, layers),
        "head": (shape["vocab_size"], hidden, 1),
    }


Product = Callable[[torch.Tensor], Any]


def in_bfloat16(weight: torch.Tensor) -> Product:
    return lambda rows: linear(rows, weight)


def in_fp8(weight: torch.Tensor) -> Product:
    """Return the product with a weight in FP8, one scale for all; rows are padded to the 16 that it takes."""
    narrow, scale = weight.to(torch.float8_e4m3fn), torch.ones((), device=weight.device)

    def product(rows: torch.Tensor) -> Any:
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 16)).to(torch.float8_e4m3fn)
        return torch._scaled_mm(padded, narrow.t(), scale_a=scale, scale_b=scale, out_dtype=DTYPE)

    return product


def in_four_bits(weight: torch.Tensor) -> Product:
    """Return the product with a weight in 4 bits, groups of 64, by torch's own kernel."""
    outputs, inputs = weight.shape
    codes = torch.randint(0, 255, (outputs, inputs // 2), device=weight.device, dtype=torch.uint8)
    if weight.device.type == "cpu":
        words = torch.randint(0, 15, (outputs, inputs), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(words, 2)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        multiply = torch.ops.aten._weight_int4pack_mm
    scales = torch.rand(inputs // 64, outputs, 2, device=weight.device, dtype=DTYPE)
    return lambda rows: multiply(rows, packed, 64, scales)


FORMATS: dict[str, Callable[[torch.Tensor], Product]] = {
    "bfloat16": in_bfloat16,
    "fp8": in_fp8,
    "int4": in_four_bits,
}


def quantised(bench: Bench) -> None:
    """Measure the matrix products of a pass in each format; weights rotate through more than the cache holds."""
    bench.free()
    for form, make in FORMATS.items():
        total: dict[int, float] = dict.fromkeys(ROWS, 0.0)
        try:
            for outputs, inputs, count in matrices(bench.shape).values():
                copies = 2 if bench.dry else 300_000_000 // (outputs * inputs) + 2
                weights = [torch.randn(outputs, inputs, device=bench.device, dtype=DTYPE) for _ in range(copies)]
                products = [make(weight) for weight in weights]
                del weights
                for rows in ROWS:
                    total[rows] += count * product_ms(bench, products, rows, inputs)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            bench.tell("quantised", format=form, failed=repr(error)[:300])
        else:
            bench.tell("quantised", format=form, products_of_a_pass_ms={str(rows): ms for rows, ms in total.items()})


def product_ms(bench: Bench, products: Sequence[Product], rows: int, inputs: int) -> float:
    """Return the time of one of these products of `rows` rows, which run after each other in one graph."""
    values = torch.randn(rows, inputs, device=bench.device, dtype=DTYPE)

    def each() -> None:
        for product in products:
            product(values)

    with torch.inference_mode():
        return bench.milliseconds(bench.recorded(each), 15) / len(products)


def tests(bench: Bench) -> None:
    """Run tests_cuda on several processes, and tell its last line."""
    bench.free()
    folder = Path(__file__).parents[1] / "tests_cuda"
    asked = ["--collect-only"] if bench.dry else ["-n", str(min(9, os.cpu_count() or 1))]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", str(folder), *asked]
    place = {"FORERUN_TEST_DEVICE": "cpu"} if bench.dry else {}
    with subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = process.communicate()[0].strip().splitlines()
        finally:
            process.kill()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    bench.tell("tests", last_line=lines[-1] if lines else "nothing was printed", failed=failed[:40])


PLAIN, LOOKUP = "transformers", "transformers, prompt lookup"
TEXT_TOKENS, EACH, FILE_CHARACTERS, BILLIONS = 160, 6, 3_000, 8.0


def texts(bench: Bench) -> None:
    """Measure tokens per second of edits and files, one by one and all at once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from forerun import shipped
    from forerun.demo.scale import ScaledModel

    bench.free()
    source = Path(shipped.resolve("demo"))
    path = source if bench.dry else ScaledModel(source, billions=BILLIONS).path
    for method in ("plain", "suffix"):
        bench.tell("texts", model=path.name, arm=method, tokens_per_second=_text_speeds(bench, path, method))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE).to(bench.device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    for name, more in ((PLAIN, {}), (LOOKUP, {"prompt_lookup_num_tokens": 10})):
        tokens, seconds = 0, 0.0
        for place, chat in enumerate(_edits()[: EACH // 2 + 1]):
            asked = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = asked["input_ids"].to(bench.device)
            began = time.perf_counter()
            written = model.generate(ids, do_sample=False, max_new_tokens=8 if bench.dry else TEXT_TOKENS, **more)
            if place:  # The first one is not counted
                tokens += written.shape[1] - ids.shape[1]
                seconds += time.perf_counter() - began
        bench.tell("texts", model=path.name, arm=name, tokens_per_second={"edit x1": tokens / seconds})


def _text_speeds(bench: Bench, path: Path, method: str) -> dict[str, float]:
    """Work and requests at once -> tokens per second, of the second of two runs."""
    from forerun import demo

    config = None if method == "plain" else {"method": method}
    llm = LLM(path, device=str(bench.device), dtype="bfloat16", speculative_config=config, max_num_seqs=EACH)
    params = SamplingParams(temperature=0, max_tokens=8 if bench.dry else TEXT_TOKENS)
    files = [file.text[:FILE_CHARACTERS] for file in demo.prompts()[:EACH]]
    found = {}
    for work, prompts in {"edit": [llm.chat_prompt(chat) for chat in _edits()], "file": files}.items():
        for count, batches in ((1, [[prompt] for prompt in prompts[: EACH // 2]]), (EACH, [prompts])):
            for turn in range(2):
                salt = f"{work} {count} {turn}"  # No drafter sees what it remembers of another
                began = time.perf_counter()
                answers = [one for batch in batches for one in llm.generate(batch, params, cache_salt=salt)]
                tokens = sum(len(one.outputs[0].token_ids) for one in answers)
                found[f"{work} x{count}"] = tokens / (time.perf_counter() - began)
    return found


def _edits() -> list[list[dict[str, str]]]:
    """Renames and changed constants, half of each."""
    from forerun import demo

    by_kind = [[one.messages for one in demo.edits() if one.name.startswith(kind)] for kind in ("rename", "constant")]
    return [chat for kind in by_kind for chat in kind[: EACH // 2]]


PARTS: dict[str, tuple[Callable[[Bench], None], int]] = {
    "ceiling": (ceiling, 20),
    "step": (step, 150),
    "without": (without, 100),
    "growth": (growth, 100),
    "peer": (peer, 80),
    "quantised": (quantised, 60),
    "tests": (tests, 200),
    "texts": (texts, 400),
}
"""Each part and the seconds after which it is cut off."""
IN_A_LEASE = [name for name in PARTS if name != "texts"]


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise CutError after so many seconds."""

    def cut(*_signal: object) -> None:
        raise CutError

    signal.signal(signal.SIGALRM, cut)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for, whatever becomes of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that gpu.jsonl is written to")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(IN_A_LEASE)}")
    parser.add_argument("--dry", action="store_true", help="on the CPU with a tiny model, to try the script")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.parts if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(out=asked.out, dry=asked.dry)
    for name in asked.parts or IN_A_LEASE:
        part, seconds = PARTS[name]
        try:
            with limit(seconds):
                part(bench)
        except CutError:
            bench.tell(name, cut_after_s=seconds)
        except Exception as error:  # whatever a driver raises: the next part is worth its minutes
            bench.tell(name, failed=repr(error)[:400])
    bench.tell("done", seconds=round(time.perf_counter() - bench.began, 1))


if __name__ == "__main__":
    main()
