"""The server and the commands with a model on the device."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from place import CUDA, DEVICE, DRAFT, EAGLE3, given, greedy, shipped, tokens_of

from forerun import LLM, AsyncLLM
from forerun.cli import main
from serve.conftest import Live, serving

TEXTS = ["def read(path):\n    ", "import os\n\n\nclass Folder:\n    def __init__(self", "# A list of", "for name in"]


def made(config: dict[str, Any] | None) -> AsyncLLM:
    return AsyncLLM(
        "demo", device=DEVICE, dtype="float32", speculative_config=config, max_num_seqs=4, max_model_len=300
    )


def streamed(live: Live, text: str, **more: Any) -> str:
    """What a stream of completions brings."""
    body = {"model": "tiny", "prompt": text, "max_tokens": 40, "temperature": 0, "stream": True, **more}
    parts = []
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event, event
                parts += [choice["text"] for choice in event["choices"]]
    return "".join(parts)


@pytest.mark.parametrize("config", [EAGLE3, DRAFT], ids=["eagle3", "draft_model"])
def test_streams_beside_each_other_are_what_the_model_says(config: dict[str, Any]) -> None:
    llm = shipped(rows=1)
    params = greedy(40)
    expected = [output.outputs[0].text for output in llm.generate(TEXTS, [params] * len(TEXTS))]
    with serving(lambda: made(config)) as live, ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            found = list(threads.map(lambda text: streamed(live, text, ignore_eos=True), TEXTS))
            assert found == expected
        list(threads.map(lambda text: streamed(live, text, temperature=0.8, top_p=0.9, seed=1), TEXTS))
        metrics = live.get("/metrics").text
        assert "forerun" in metrics and live.get("/health").status_code == 200


def test_two_asynchronous_engines() -> None:
    """In one loop, each with a thread of its own."""
    expected = tokens_of(shipped().generate(given((20, 50, 33)), greedy(40)))

    async def both() -> list[list[Any]]:
        async with made(EAGLE3) as one, made(DRAFT) as other:
            jobs = [asyncio.gather(*(llm.generate(p, greedy(40)) for p in given((20, 50, 33)))) for llm in (one, other)]
            return list(await asyncio.gather(*jobs))

    for answers in asyncio.run(both()):
        assert [answer[0].outputs[0].token_ids for answer in answers] == expected


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", DEVICE, "--json", "--dtype", "float32", "-n", "64", "--repeats", "1"]) == 0
    found = said(capsys)
    print(json.dumps({name: value for name, value in found.items() if name != "text"}))  # noqa: T201
    assert found["identical"] is True and found["device"].startswith(DEVICE)


def test_the_demo_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    """A text may part where two tokens are as likely, which the report then says, and it is no error."""
    code = main(["demo", "--device", DEVICE, "--json", "--dtype", "bfloat16", "-n", "128"])
    found = said(capsys)
    print(code, json.dumps({name: value for name, value in found.items() if name != "text"}))  # noqa: T201
    assert code == 0 or found["numeric_tie"]
    assert not CUDA or "bfloat16" in found["runs_as"]  # A CPU multiplies the blocks of the file


def test_the_doctor_names_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    found = capsys.readouterr().out
    print(found[:3000])  # noqa: T201
    assert not CUDA or torch.cuda.get_device_name() in found


def test_costs_are_measured() -> None:
    from forerun.control.measuring import load_or_measure

    llm = LLM("demo", device=DEVICE, dtype="float32", max_num_seqs=4, max_model_len=256)
    cost = load_or_measure(llm.target, nodes=(1, 4, 16), contexts=(64,), repeats=3, seconds=4.0)
    print("ms of passes by rows and nodes:", cost.rows, cost.nodes, cost.pass_times_ms)  # noqa: T201
    assert all(time > 0 for plane in cost.pass_times_ms for row in plane for time in row)
