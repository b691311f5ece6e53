"""What stands beside the answers: loading, limits, draining, metrics and their dashboard, probes, HTTPS, deadlines."""

import asyncio
import configparser
import json
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import NotFoundError, OpenAI

from forerun import AsyncLLM
from forerun.engine.completion import Request
from forerun.errors import ArgumentError, CheckpointError
from forerun.serve import guards
from forerun.serve import server as http_server
from forerun.serve.session import Session, State
from forerun.serve.settings import ServeSettings
from serve.conftest import NAME, Live, counters, sent, serving, wait_for


def test_the_counters_add_up(live: Live) -> None:
    before = counters(live)
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    stats = live.post("/v1/completions", body).json()["metrics"]["speculative_decoding"]
    after = counters(live)

    def grown(name: str, labels: str = "") -> float:
        return after[f"vllm:{name}{{{labels}}}"] - before.get(f"vllm:{name}{{{labels}}}", 0.0)

    assert grown("generation_tokens_total") == 12
    assert grown("request_success_total", 'finished_reason="length"') == 1
    assert grown("spec_decode_num_drafts_total") == stats["num_spec_steps"]
    assert grown("spec_decode_num_draft_tokens_total") == stats["num_draft_tokens"]
    assert grown("spec_decode_num_accepted_tokens_total") == stats["num_accepted_draft_tokens"]
    positions = [name for name in after if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
    assert positions and grown("time_to_first_token_seconds_count") == 1
    assert after["vllm:num_requests_running{}"] == 0


OF_VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "request_success"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("spec_decode_num_accepted_tokens_per_pos", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_prefill_kv_computed_tokens", "request_params_n", "request_params_max_tokens"),
}
NOT_OF_VLLM = {
    "iteration_tokens_total": "the engine keeps no figures of single passes",
    "request_num_preemptions": "num_preemptions counts them all",
    "num_requests_waiting_by_reason": "all that wait do so for a row",
    "engine_sleep_state": "GET /health and GET /is_sleeping say it",
    "admission_rejections": "forerun:http_requests counts them, with status 429",
    "cache_config_info": "the cache has no blocks",
    "corrupted_requests": "numbers that are none end a request with the reason 'error'",
    **dict.fromkeys(("prompt_tokens_by_source", "prompt_tokens_cached_by_source"), "there is one cache"),
    **dict.fromkeys(("external_prefix_cache_queries", "external_prefix_cache_hits"), "there is one cache"),
    **dict.fromkeys(
        ("num_requests_kv_fetch_by_stage", "kv_block_lifetime_seconds"),
        "the cache has no blocks, and is this server's own",
    ),
    **dict.fromkeys(("kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds"), "the cache has no blocks"),
    **dict.fromkeys(("mm_cache_queries", "mm_cache_hits"), "text alone is read"),
    **dict.fromkeys(("lora_requests_info", "watermark_requests"), "there are neither adapters nor watermarks"),
    **dict.fromkeys((f"estimated_{of}_per_gpu_total" for of in ("flops", "read_bytes", "write_bytes")), "no estimates"),
}
"""The metrics of vLLM 0.32 (``vllm/v1/metrics``) that this server lacks, each with the reason."""


def test_vllms_metrics_are_there_or_there_is_a_reason(live: Live) -> None:
    there = set(re.findall(r"^# TYPE vllm:(\S+) ", live.get("/metrics").text, re.MULTILINE))
    assert {name.removesuffix("_total") for name in there} == OF_VLLM and not OF_VLLM & NOT_OF_VLLM.keys()


@pytest.mark.parametrize(("prompt", "max_tokens", "most"), [("the cat", 12, 12), ([7] * 190, 60, 10)])
def test_histograms_hold_what_the_answer_says(live: Live, prompt: str | list[int], max_tokens: int, most: int) -> None:
    """The second request would go beyond the context, 200 tokens: its `max_tokens` is lowered, as vLLM lowers it."""
    before = counters(live)
    body = {"prompt": prompt, "n": 2, "ignore_eos": True, "max_tokens": max_tokens}
    usage = live.post("/v1/completions", body).json()["usage"]
    after = counters(live)

    def grown(name: str) -> float:
        return after[f"{name}{{}}"] - before[f"{name}{{}}"]

    def total(name: str, times: int = 1) -> float:
        assert grown(f"vllm:{name}_count") == times
        return grown(f"vllm:{name}_sum")

    assert total("request_prompt_tokens") == usage["prompt_tokens"]
    assert (
        total("request_prefill_kv_computed_tokens") + grown("vllm:prompt_tokens_cached_total") == usage["prompt_tokens"]
    )
    assert total("request_generation_tokens", 2) == usage["completion_tokens"] == 2 * most
    assert total("request_max_num_generation_tokens") == total("request_params_max_tokens") == most
    assert total("request_params_n") == 2
    queue, prefill, decode = (total(f"request_{of}_time_seconds") for of in ("queue", "prefill", "decode"))
    assert queue >= 0 and prefill > 0 and queue + prefill == pytest.approx(total("time_to_first_token_seconds"))
    assert total("request_inference_time_seconds") == pytest.approx(prefill + decode)
    assert total("e2e_request_latency_seconds") == pytest.approx(queue + prefill + decode)
    passes = int(grown("forerun:passes_total"))
    assert 0 < total("inter_token_latency_seconds", passes - 2) <= 2 * (prefill + decode)


def test_a_full_queue_is_a_429(checkpoint: Path) -> None:
    with serving(checkpoint, max_queue=2) as small:
        guards.CLIENT.set(guards.Client(name="somebody", domain=None))
        with small.session.admitted(1):
            answer = small.post("/v1/completions", {"prompt": "x", "n": 2})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"


def test_what_no_queue_could_ever_hold_is_a_400(checkpoint: Path) -> None:
    """A 429 would invite to try again."""
    messages = [{"role": "user", "content": "x"}]
    with serving(checkpoint, max_queue=2) as small:
        assert small.post("/v1/completions", {"prompt": "x", "n": 3}).json()["error"]["param"] == "prompt"
        assert small.post("/v1/completions", {"prompt": ["x"] * 3}).json()["error"]["param"] == "prompt"
        assert small.post("/v1/chat/completions", {"messages": messages, "n": 3}).json()["error"]["param"] == "n"
        assert small.post("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 1}).status_code == 200
    for keys, most in (((), 30), (("one",), 30), (("one", "two"), 15)):
        assert ServeSettings(max_queue=40, api_keys=keys).most_answers == most


def test_not_ready_is_a_503(checkpoint: Path) -> None:
    session = Session(ServeSettings(model_names=(NAME,)), lambda: AsyncLLM(str(checkpoint / "nothing")))
    with pytest.raises(Exception, match="loading"):
        _ = session.engine
    asyncio.run(session.start())
    assert session.state is State.FAILED
    with pytest.raises(Exception, match="failed") as caught:
        _ = session.engine
    assert caught.value.status == 503
    assert issubclass(CheckpointError, Exception)


def test_a_frozen_engine_is_not_ready(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is frozen at: a step, or a request that it takes in; and until that ends."""
    with serving(checkpoint, step_timeout_s=0.2) as live:
        for where in ("step", "add"):
            thawed, answers, engine = threading.Event(), list[httpx.Response](), live.llm.engine
            real = getattr(engine, where)

            def frozen(*given: Any, thawed: threading.Event = thawed, real: Callable[..., Any] = real) -> Any:
                thawed.wait(20)
                return real(*given)

            monkeypatch.setattr(engine, where, frozen)
            ask = partial(live.post, "/v1/completions", {"prompt": "the", "max_tokens": 3, "ignore_eos": True})
            thread = threading.Thread(target=lambda ask=ask, answers=answers: answers.append(ask()))
            thread.start()
            wait_for(lambda: live.get("/health").status_code == 503)
            assert live.get("/health").json() == {"status": "frozen"}
            refused = live.post("/v1/completions", {"prompt": "the"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "frozen"
            monkeypatch.setattr(engine, where, real)
            thawed.set()
            thread.join()
            assert answers[0].status_code == 200
            wait_for(lambda: live.get("/health").status_code == 200)


def test_a_long_prompt_is_not_frozen(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps together take longer than one may."""

    def in_pieces() -> AsyncLLM:
        return AsyncLLM(str(checkpoint), dtype="float32", max_model_len=200, max_num_batched_tokens=32)

    with serving(in_pieces, step_timeout_s=1.5) as live:
        engine, seen = live.llm.engine, set[str]()
        real = engine.step

        def slow() -> Any:
            time.sleep(0.3)
            seen.add(live.session.health.value)
            return real()

        monkeypatch.setattr(engine, "step", slow)
        answer = live.post("/v1/completions", {"prompt": [7] * 190, "max_tokens": 3, "ignore_eos": True})
        assert answer.status_code == 200 and seen == {"ready"}


def test_one_model(client: OpenAI) -> None:
    assert client.models.retrieve(NAME).id == NAME == client.models.list().data[0].id
    for other in ("gpt-9", "org/name", "/models/another/one"):
        with pytest.raises(NotFoundError, match=f"'{other}': there is no such model here; this server has '{NAME}'"):
            client.models.retrieve(other)
        with pytest.raises(NotFoundError) as caught:
            client.completions.create(model=other, prompt="x")
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_model_has_several_names_and_needs_none(checkpoint: Path) -> None:
    names = [NAME, checkpoint.name, str(checkpoint)]
    with serving(checkpoint, also=tuple(names[1:])) as live:
        client = live.client()
        assert [model.id for model in client.models.list()] == [NAME], "one model is listed once"
        for name in names:
            assert client.completions.create(model=name, prompt="x", max_tokens=1).model == NAME
            assert client.models.retrieve(name).id == name
        ask = {"messages": [{"role": "user", "content": "x"}]}
        short: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
        short |= {path: ask for path in ("/v1/chat/completions", "/v1/messages")}
        for path, body in short.items():
            most = "max_output_tokens" if path.endswith("responses") else "max_tokens"
            assert live.post(path, {**body, most: 1}).json()["model"] == NAME
            refused = live.post(path, {**body, most: 1, "model": "gpt-9"})
            assert refused.status_code == 404 and all(repr(name) in refused.text for name in names)


def test_the_list_of_models_may_end_in_a_slash(live: Live) -> None:
    assert live.get("/v1/models/").json() == live.get("/v1/models").json()


def test_probes(live: Live) -> None:
    assert live.get("/ping").status_code == live.post("/ping", None).status_code == 200
    assert live.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/v1/models", f"/v1/models/{NAME}", "/"])
def test_head_is_get_without_a_body(live: Live, path: str) -> None:
    whole, head = live.get(path), httpx.head(live.url + path, timeout=30)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert httpx.head(live.url + "/v1/chat/completions").status_code == 405
    assert httpx.head(live.url + "/nothing").status_code == 404


def test_what_needs_a_key(checkpoint: Path) -> None:
    with serving(checkpoint, api_keys=("secret",)) as locked:
        for path in ("/health", "/ping", "/version"):
            assert locked.get(path).status_code == httpx.head(locked.url + path).status_code == 200
        for path in ("/load", "/v1/models", f"/v1/models/{NAME}"):
            refused = locked.get(path)
            assert refused.status_code == httpx.head(locked.url + path).status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
            for key, status in (("secret", 200), ("wrong", 401), ("secre", 401), ("", 401)):
                for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}".strip()}):
                    assert locked.get(path, headers=headers).status_code == status, (path, headers)
        asked = locked.post("/v1/completions", {"prompt": 5}, headers={"x-api-key": "secret"})
        assert asked.status_code == 400 and "www-authenticate" not in asked.headers
        assert [model.id for model in locked.client("secret").models.list()] == [NAME]


def test_a_path_in_front(checkpoint: Path) -> None:
    with serving(checkpoint, api_keys=("secret",), root_path="/llm") as behind:
        keyed = {"authorization": "Bearer secret"}
        for prefix in ("", "/llm"):
            assert behind.get(f"{prefix}/health").status_code == 200
            assert behind.get(f"{prefix}/v1/models").status_code == 401
            assert behind.get(f"{prefix}/v1/models", headers=keyed).status_code == 200
            assert behind.post(f"{prefix}/v1/messages", {}, headers=keyed).json()["type"] == "error"
        assert behind.get("/llm/openapi.json", headers=keyed).json()["servers"] == [{"url": "/llm"}]
        assert behind.get("/other/health").status_code == 401


@pytest.mark.parametrize("wrong", ["llm", "/llm/"])
def test_a_path_that_is_none(wrong: str) -> None:
    with pytest.raises(ArgumentError, match="--root-path"):
        ServeSettings(model_names=(NAME,), root_path=wrong)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    options += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(["openssl", "req", *options], check=True, capture_output=True)
    return cert, key


class TestHttps:
    def test_the_server_speaks_it(self, checkpoint: Path, certificate: tuple[Path, Path]) -> None:
        cert, key = certificate
        trusting = ssl.create_default_context(cafile=str(cert))
        limits = {"receive_timeout_s": 0.5}
        with serving(checkpoint, ssl_certfile=str(cert), ssl_keyfile=str(key), verify=trusting, **limits) as safe:
            assert safe.url.startswith("https://")
            body = {"prompt": "the cat", "max_tokens": 3}
            assert safe.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3
            with pytest.raises(httpx.ConnectError):
                httpx.get(safe.url + "/health", verify=True)
            with pytest.raises(httpx.HTTPError):
                httpx.get(safe.url.replace("https", "http") + "/health")

            def dawdling() -> Iterator[bytes]:
                yield b'{"prompt": '
                time.sleep(1.0)
                yield b'"x"}'

            typed = {"content-type": "application/json"}
            late = httpx.post(safe.url + "/v1/completions", content=dawdling(), headers=typed, verify=trusting)
            assert late.status_code == 408, "a refusal closes a connection that cannot be half closed"

    def test_files_that_cannot_be_used(self, certificate: tuple[Path, Path], tmp_path: Path) -> None:
        cert, _ = certificate
        (tmp_path / "no.pem").write_text("nothing", encoding="utf-8")
        for wrong in (tmp_path / "missing.pem", tmp_path / "no.pem"):
            settings = ServeSettings(model_names=(NAME,), ssl_certfile=str(wrong))
            with pytest.raises(ArgumentError, match="HTTPS"):
                http_server.server(Session(settings, lambda: pytest.fail("not loaded")), host="127.0.0.1", port=0)
        with pytest.raises(ArgumentError, match="--ssl-certfile"):
            ServeSettings(model_names=(NAME,), ssl_keyfile=str(cert))


LONG = {
    "prompt": "the cat sat on the mat; pack my box with five dozen liquor jugs",
    "temperature": 0,
    "ignore_eos": True,
}


def test_an_answer_ends_when_its_time_is_up(live: Live) -> None:
    whole = live.post("/v1/completions", {**LONG, "max_tokens": 64}).json()["choices"][0]
    answer = live.post("/v1/completions", {**LONG, "max_tokens": 64, "timeout_s": 1e-6}).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "abort" and whole["text"].startswith(choice["text"])
    assert answer["usage"]["completion_tokens"] < 64 and live.session.in_flight == 0


def test_a_stream_that_never_began_tells_of_its_prompt(checkpoint: Path) -> None:
    with serving(checkpoint, request_timeout_s=1e-6) as live:
        ids = live.post("/tokenize", {"prompt": LONG["prompt"]}).json()["tokens"]
        body = {**LONG, "prompt": ids, "echo": True, "logprobs": 1, "stream": True, "return_token_ids": True}
        first, *_ = sent(live.post("/v1/completions", body).text)
        [choice] = first["choices"]
        assert choice["text"] == LONG["prompt"] and choice["prompt_token_ids"] == ids
        assert choice["logprobs"]["tokens"] == [], "no numbers: it was not read"
        asked = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5, "stream": True}
        begun, *_ = sent(live.post("/v1/messages", asked).text)
        assert begun["message"]["usage"]["input_tokens"] > 0


ECHO = {"echo": True, "logprobs": 2}


@pytest.mark.parametrize("asked", [ECHO, {**ECHO, "stream": True}, {"prompt_logprobs": 1}])
def test_no_numbers_are_given_of_a_prompt_that_was_read_in_part(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(Request, "timed_out", lambda request, _: request.prompt_logprobs is not None)
    small = partial(AsyncLLM, str(checkpoint), dtype="float32", max_num_batched_tokens=4)
    with serving(small) as live:
        answer = live.post("/v1/completions", {**LONG, **asked})
        assert answer.status_code == 200
        events = sent(answer.text) if "stream" in asked else [answer.json()]
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "abort" and choices[0].get("prompt_logprobs") is None
        assert not any(choice["logprobs"] and choice["logprobs"]["tokens"] for choice in choices)


def test_the_operator_sets_the_limit(checkpoint: Path) -> None:
    with serving(checkpoint, request_timeout_s=1e-6) as live:
        refused = live.post("/v1/completions", {**LONG, "timeout_s": 3})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "timeout_s"
        answer = live.post("/v1/completions", {**LONG, "max_tokens": 64}).json()
        assert answer["choices"][0]["finish_reason"] == "abort"
    with pytest.raises(ArgumentError, match="request-timeout"):
        ServeSettings(model_names=("tiny",), request_timeout_s=0.0)


DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_files_are_well_formed() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"forerun", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), source
    for path in DEPLOY.rglob("*.y*ml"):
        assert yaml.safe_load(path.read_text()), path
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read_string((DEPLOY / "forerun.service").read_text())
    assert unit["Service"]["ExecStart"].endswith("forerun serve $FORERUN_ARGUMENTS")


def test_the_dashboard_asks_for_metrics_that_there_are(live: Live) -> None:
    there = set(re.findall(r"^# TYPE (\S+) ", live.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana" / "forerun.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"] for name in _names(target["expr"])}
    assert len(asked) > 12
    assert {name.removesuffix("_bucket") for name in asked} <= there


def _names(expression: str) -> set[str]:
    return set(re.findall(r"(?:vllm|forerun):\w+", expression))
