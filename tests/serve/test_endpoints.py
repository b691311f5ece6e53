"""What stands beside the answers: the model's card, probes, HEAD, HTTPS, a path in front of all paths."""

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from forerun.errors import ArgumentError
from forerun.serve import server as http_server
from forerun.serve.session import Session
from forerun.serve.settings import ServeSettings
from serve.conftest import NAME, Live, serving


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
        assert [model.id for model in client.models.list()] == names
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

            late = httpx.post(safe.url + "/v1/completions", content=dawdling(), verify=trusting)
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
