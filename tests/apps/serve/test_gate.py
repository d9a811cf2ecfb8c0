"""Keys, Host, limits on bodies and numbers, slow clients, and the end of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import warm_python
from allyouneed.apps.serve.security import Keys, check_binding
from allyouneed.apps.serve.settings import Limits, Settings
from allyouneed.cli import main
from served import BOTH_SERVERS, Running, raw, served_client, serving
from waiting import PATIENCE, until

LONG = {"model": "lm", "prompt": "x", "max_tokens": 200, "temperature": 0}


def test_every_route_needs_a_key(folders: dict[str, Path]) -> None:
    keys = ("secret-key", "another-key")
    with served_client({"lm": folders["lm"]}, keys=keys, open_probes=False) as (_, client):
        routes = client.get("/openapi.json", headers={"authorization": "Bearer secret-key"}).json()["paths"]
        assert "/v1/completions" in routes
        for path in [*routes, "/openapi.json", "/nothing"]:
            for method in ("GET", "POST", "DELETE"):
                expected = 403 if path.startswith(("/v2/", "/v3/")) else 401  # DeepL's
                assert client.request(method, path).status_code == expected, (method, path)
        for wrong in ("Bearer secret-ke", "Bearer", "secret-keyx", "Basic secret-key", "Bearer é"):
            assert client.get("/healthz", headers=[(b"authorization", wrong.encode())]).status_code == 401, wrong
        for right in ("Bearer another-key", "bearer secret-key", "DeepL-Auth-Key secret-key"):
            assert client.get("/healthz", headers={"authorization": right}).status_code == 200
        refused = client.get("/v1/models").json()["error"]
        assert refused["type"] == "authentication_error" and refused["code"] == "invalid_api_key"


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    from allyouneed.apps.serve import security

    real = security.hmac.compare_digest
    monkeypatch.setattr(security.hmac, "compare_digest", lambda a, b: bool(compared.append(len(a))) or real(a, b))
    keys = Keys(["first-key", "second-key", "third-key"])
    assert keys.find("first-key") == 0 and keys.find("no") is None
    assert compared == [32] * 6  # digests of one length


def test_binding_to_another_host_needs_a_key_or_no_auth(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--host", "0.0.0.0", "--port", "0"])
    assert end.value.code == 2 and "--no-auth" in capsys.readouterr().err
    check_binding(Settings(host="0.0.0.0"), no_auth=True)
    check_binding(Settings(host="0.0.0.0", keys=("long-enough",)), no_auth=False)
    check_binding(Settings(host="::1"), no_auth=False)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:8000", True),
        ("127.0.0.1", True),
        ("[::1]:80", True),
        ("10.0.0.3:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_names_in_the_host_header(client: httpx.Client, host: str, allowed: bool) -> None:
    assert client.get("/healthz", headers={"host": host}).status_code == (200 if allowed else 421)


@BOTH_SERVERS
def test_bodies_that_are_no_requests(client: httpx.Client) -> None:
    def status(content: bytes, **headers: str) -> int:
        found = client.post("/v1/completions", content=content, headers={"content-type": "application/json"} | headers)
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}
        return found.status_code

    assert status(b"") == status(b"{") == status(b"[1]") == status(b"\xff\xfe") == 400
    assert status(b"[" * 100_000) == status(b'{"a":' * 100_000) == 400
    assert status(b"{}", **{"content-encoding": "gzip"}) == 415
    assert status(b'{"prompt": "' + b"x" * (5 << 20) + b'"}') == 413
    assert status(b'{"prompt": "' + b"x" * (3 << 20) + b'"}') == 400


@BOTH_SERVERS
def test_the_http_layer(server: Running) -> None:
    host = b"Host: localhost\r\n"
    assert b" 431 " in raw(server.port, b"GET / HTTP/1.1\r\n" + host + b"X: " + b"a" * 100_000 + b"\r\n\r\n")
    assert b" 400 " in raw(server.port, b"\x16\x03\x01nonsense\r\n\r\n")
    chunks = b"POST /v1/completions HTTP/1.1\r\n" + host + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in raw(server.port, chunks + (b"100000\r\n" + b"x" * (1 << 20) + b"\r\n") * 5)


def test_slow_clients_are_cut_off(folders: dict[str, Path]) -> None:
    limits = Limits(header_seconds=0.3, body_seconds=0.3)
    with serving({"lm": folders["lm"]}, limits=limits) as running:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        assert raw(running.port, head) == b""  # the header never ends
        assert raw(running.port, b"") == b""
        assert b" 408 " in raw(running.port, head + b"Content-Length: 10\r\n\r\n{")
        with httpx.Client(base_url=running.url) as client:  # a connection that is kept alive is not cut off
            for _ in range(2):
                assert client.get("/healthz").status_code == 200
                time.sleep(0.4)


def test_more_than_the_limit_get_429(folders: dict[str, Path]) -> None:
    limits = Limits(concurrent=2, queue=3)
    with served_client({"lm": folders["lm"]}, limits=limits) as (running, client), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: client.post("/v1/completions", json=LONG), range(8)))
        codes = [answer.status_code for answer in found]
        assert set(codes) == {200, 429} and codes.count(200) >= 2
        refused = next(answer for answer in found if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1" and "limit" in refused.json()["error"]["message"]
        full = client.post("/v1/completions", json=LONG | {"n": 4, "temperature": 1})
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
        until(lambda: running.model("lm").loop.sequences == 0)  # those that were admitted first are gone, too
        assert client.post("/v1/completions", json=LONG).status_code == 200
        assert client.get("/healthz").status_code == 200


def test_the_log_contains_no_request_texts(
    server: Running, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client.post("/v1/completions?token=hidden", json={"model": "lm", "prompt": "my secret", "max_tokens": 1})
    client.post("/v1/completions", json={"model": "my secret", "prompt": "my secret"})
    assert "POST /v1/completions 200" in caplog.text and "404" in caplog.text
    ours = "".join(record.getMessage() for record in caplog.records if record.name not in ("httpx", "httpcore"))
    assert "secret" not in ours and "hidden" not in ours


def test_sigterm_under_load_loses_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "allyouneed", "serve", f"lm={folders['lm']}", "--port", "0"]
    process = warm_python.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    line = process.stderr.readline()
    url = line.split()[3]
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE) as client, ThreadPoolExecutor(12) as pool:
            expected = client.post("/v1/completions", json=LONG).json()["choices"]
            accepted = threading.Barrier(9)

            def ask(stream: bool) -> Any:
                with client.stream("POST", "/v1/completions", json=LONG | {"stream": stream}) as answer:
                    if stream:
                        lines = answer.iter_lines()
                        first = next(lines)
                        accepted.wait(PATIENCE)
                        return "".join(
                            json.loads(one[6:])["choices"][0]["text"]
                            for one in [first, *lines]
                            if one.startswith("data: {")
                        )
                    answer.read()
                    return answer.json()["choices"][0]["text"]

            streams = [pool.submit(ask, True) for _ in range(8)]
            accepted.wait(PATIENCE)
            process.send_signal(signal.SIGTERM)
            refused = 0
            while process.poll() is None and not refused:
                try:
                    refused = int(client.post("/v1/completions", json=LONG).status_code == 503)
                except httpx.TransportError:
                    break
            assert [one.result() for one in streams] == [expected[0]["text"]] * 8
        assert process.wait(PATIENCE) == 0
        assert refused
    finally:
        process.kill()
