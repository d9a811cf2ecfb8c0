"""What requests hold: announced bytes count, one client gets a share, and requests without a key lock nobody out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from allyouneed.apps.serve.gate import Gate
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.settings import Limits, Settings
from asgi import Got, ask

KEYS = ("first-key", "other-key")
FIRST = {"authorization": "Bearer first-key"}
OTHER = {"authorization": "Bearer other-key"}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    client = scope["state"]["client"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-client", client)]})
    await send({"type": "http.response.body", "body": b"%d" % len(body)})


def gate(keys: tuple[str, ...] = (), app: Any = echo, **limits: Any) -> Gate:
    return Gate(app, Settings(keys=keys, limits=Limits(**limits)), Metrics())


Ask = Callable[..., Coroutine[Any, Any, Got]]


def with_hanging(gate: Gate, count: int, then: Callable[[], Coroutine[Any, Any, None]], **request: Any) -> list[Got]:
    """Run `then` while this many requests wait for the rest of their bodies; their answers if they were refused."""

    async def run() -> list[Got]:
        tasks = [asyncio.create_task(ask(gate, "POST", hangs=True, **request)) for _ in range(count)]
        for _ in range(20):
            await asyncio.sleep(0)
        await then()
        refused = [task.result() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return refused

    found = asyncio.run(run())
    assert not gate.buffered and not gate.requests.total and not gate.keyless.total and not gate.in_progress
    assert not gate.bodies.held and not gate.requests.held
    return found


def test_a_body_counts_from_when_it_is_announced() -> None:
    made = gate(body_bytes=1000, buffered_bytes=4000)
    header = {"content-length": "1000"}

    async def then() -> None:
        assert made.buffered == 3000  # three quarters of 4000, of one client
        assert (await ask(made, "POST", "/v1/completions", b"x" * 10)).status == 429
        assert (await ask(made, "POST", "/v1/completions", b"x" * 10, address="10.0.0.2")).status == 200

    refused = with_hanging(made, 90, then, path="/v1/completions", body=[b"x"], headers=header)
    assert len(refused) == 87 and {one.status for one in refused} == {429}
    assert "3000 bytes" in refused[0].body.decode() and refused[0].headers["retry-after"] == "1"


def test_parts_of_a_body_of_unknown_length_are_counted_as_they_arrive() -> None:
    made = gate(body_bytes=1000, buffered_bytes=4000)

    async def then() -> None:
        assert made.buffered == 2400

    refused = with_hanging(made, 10, then, path="/v1/completions", body=[b"x" * 400, b"x" * 400])
    assert len(refused) == 7


def test_the_bytes_of_a_request_are_free_when_it_ends() -> None:
    made = gate(buffered_bytes=4000, body_bytes=4000)

    async def run() -> None:
        for _ in range(3):
            assert (await ask(made, "POST", "/v1/completions", b"x" * 3000)).body == b"3000"
            assert (await ask(made, "POST", "/v1/completions", [b"x" * 1500] * 2)).body == b"3000"
            assert (await ask(made, "POST", "/v1/completions", b"x" * 3500)).status == 429
            assert made.buffered == 0

    asyncio.run(run())


def test_bodies_without_a_key_lock_no_key_out() -> None:
    """1,024 bodies of one byte, from many addresses, to the route whose clients send their key in the body."""
    made = gate(KEYS)

    async def run() -> list[Got]:
        strangers = [
            asyncio.create_task(
                ask(made, "POST", "/translate", [b"{"], {"content-length": "10"}, address=f"10.0.{n}.1", hangs=True)
            )
            for n in range(1024)
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        assert made.keyless.total == made.limits.keyless and made.requests.total == 0
        assert made.buffered <= 10 * made.limits.keyless
        for path in ("/translate", "/v1/completions"):
            assert (await ask(made, "POST", path, b"{}", FIRST)).headers["x-client"] == "key 0"
        refused = [one.result() for one in strangers if one.done()]
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        return refused

    refused = asyncio.run(run())
    assert len(refused) == 1024 - made.limits.keyless and {one.status for one in refused} == {429}


def test_a_key_in_a_header_is_checked_before_the_body_is_read() -> None:
    async def run() -> None:
        made = gate(KEYS)
        wrong = {"authorization": "Bearer wrong-key", "content-length": "1000000"}
        for path in ("/translate", "/v1/completions"):
            assert (await ask(made, "POST", path, [b"x"], wrong, hangs=True)).status == 401
        assert (await ask(made, "POST", "/v1/completions", [b"x"], hangs=True)).status == 401  # none at all

    asyncio.run(run())


def test_a_body_that_brings_its_key_is_small() -> None:
    async def run() -> None:
        made = gate(KEYS, keyless_bytes=100)
        for name in ("api_key", "apiKey"):
            body = json.dumps({name: "other-key", "q": "a"}).encode()
            assert (await ask(made, "POST", "/translate", body)).headers["x-client"] == "key 1"
            form = f"q=a&{name}=other-key".encode()
            kind = {"content-type": "application/x-www-form-urlencoded"}
            assert (await ask(made, "POST", "/translate", form, kind)).headers["x-client"] == "key 1"
        large = json.dumps({"api_key": "other-key", "q": "a" * 100}).encode()
        refused = await ask(made, "POST", "/translate", large)
        assert refused.status == 413 and "Authorization" in refused.body.decode()
        assert (await ask(made, "POST", "/translate", large, OTHER)).status == 200
        assert (await ask(made, "POST", "/translate", b'{"api_key": "wrong-key"}')).status == 401
        assert (await ask(made, "POST", "/translate", b"{" * 50)).status == 401

    asyncio.run(run())


def test_one_client_leaves_room_for_others() -> None:
    made = gate(KEYS, concurrent=8)

    async def then() -> None:
        assert made.requests.total == 6
        assert (await ask(made, "POST", "/v1/completions", b"{}", FIRST)).status == 429
        assert (await ask(made, "POST", "/v1/completions", b"{}", OTHER)).headers["x-client"] == "key 1"

    refused = with_hanging(made, 10, then, path="/v1/completions", body=[b"x"], headers=FIRST)
    assert len(refused) == 4 and "6 requests of one client" in refused[0].body.decode()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),  # a machine has a network of addresses
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_clients_by_their_addresses(one: str, other: str, same: bool) -> None:
    async def clients() -> list[str]:
        return [
            (await ask(gate(), "POST", "/v1/completions", b"", address=address)).headers["x-client"]
            for address in (one, other)
        ]

    found = asyncio.run(clients())
    assert (found[0] == found[1]) == same


def test_uploads_are_large_only_where_files_are_taken() -> None:
    async def run() -> None:
        made = gate(body_bytes=1000, upload_bytes=5000)
        kind = {"content-type": "multipart/form-data; boundary=x"}
        assert (await ask(made, "POST", "/v1/audio/transcriptions", b"x" * 4000, kind)).status == 200
        assert (await ask(made, "POST", "/translate", b"x" * 4000, kind)).status == 413

    asyncio.run(run())


def test_a_form_or_a_query_of_65_fields(translating: tuple[Any, Any]) -> None:
    _, client = translating
    many = "&".join(["q=Hello"] * 65)
    form = {"content-type": "application/x-www-form-urlencoded"}
    found = client.post("/translate", content=f"{many}&source=en&target=de", headers=form)
    assert found.status_code == 200 and len(found.json()["translatedText"]) == 65
    bare = {"authorization": ""}
    keyed = f"{many}&source=en&target=de&api_key=secret-key"
    assert client.post("/translate", content=keyed, headers=form | bare).status_code == 200
    assert client.get(f"/translate?{keyed}", headers=bare).status_code == 200
    for path in ("/translate", "/v1/models", "/v2/languages", "/healthz"):
        assert client.get(path, params=dict.fromkeys(map(str, range(65)), "a")).status_code < 500
    assert client.post("/translate", content="q=a&" * 5000, headers=form).status_code == 400


def test_a_key_in_a_url_opens_only_the_routes_whose_clients_send_it_there() -> None:
    async def run() -> None:
        made = gate(KEYS)
        for name in ("api_key", "apiKey", "token", "key"):
            query = f"{name}=first-key"
            assert (await ask(made, "POST", "/translate", b"", query=query)).headers["x-client"] == "key 0"
            for path in ("/v1/completions", "/v2/translate", "/api/tags"):
                assert (await ask(made, "GET", path, query=query)).status in (401, 403), (path, name)
        assert (await ask(made, "GET", "/v2/translate", query="auth_key=first-key&text=a")).status == 200
        assert (await ask(made, "GET", "/v2/usage", query="auth_key=first-key")).status == 403

    asyncio.run(run())
