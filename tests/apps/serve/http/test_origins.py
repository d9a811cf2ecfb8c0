"""From where requests may come: names in the Host header, origins of web pages, and CORS."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from allyouneed.apps.serve.gate import Gate
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.security import check_binding
from allyouneed.apps.serve.settings import Settings
from allyouneed.errors import UserError
from asgi import Got, ask

PAGE = "https://app.example.com"
KEY = {"authorization": "Bearer some-long-key"}


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def request(method: str = "POST", path: str = "/v1/completions", settings: Any = None, **headers: str) -> Got:
    made = Gate(answer_ok, Settings(**(settings or {})), Metrics())
    return asyncio.run(ask(made, method, path, headers={name.replace("_", "-"): one for name, one in headers.items()}))


def cors(got: Got) -> dict[str, str]:
    return {name: value for name, value in got.headers.items() if name.startswith("access-control")}


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://evil.example:8000", "null", "http://localhost:3000"]
)
def test_web_pages_from_elsewhere_are_refused(origin: str) -> None:
    """Whatever they send, for a page may send text without asking; and not told anything."""
    for method in ("POST", "GET", "DELETE", "PUT"):
        got = request(method, origin=origin, host="localhost:8000", content_type="text/plain")
        assert got.status == 403 and not cors(got) and "--allow-origin" in got.body.decode()
    asked = request("OPTIONS", origin=origin, host="localhost:8000", access_control_request_method="POST")
    assert asked.status == 403 and not cors(asked)


def test_a_page_may_link_to_the_page_but_load_nothing_else() -> None:
    assert request("GET", "/", sec_fetch_site="cross-site").status == 200
    assert request("GET", "/translate", sec_fetch_site="cross-site").status == 403  # an image of it, for example
    assert request("GET", "/v1/models", sec_fetch_site="none").status == 200  # typed


@pytest.mark.parametrize(
    ("host", "origin", "settings"),
    [
        ("localhost:8000", "http://localhost:8000", {}),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", {}),
        ("[::1]:8000", "http://[::1]:8000", {}),
        ("192.168.1.5:8000", "http://192.168.1.5:8000", {}),
        ("api.example.com", "https://api.example.com", {"hosts": ("api.example.com",)}),
        ("api.example.com", "https://api.example.com:8443", {"hosts": ("API.example.com",)}),  # nginx: Host $host
        ("api.example.com:8443", "https://api.example.com:8443", {"hosts": ("*",)}),
        ("box:8000", "http://box:8000", {"host": "0.0.0.0"}),
    ],
)
def test_the_servers_own_page_goes_on_working(host: str, origin: str, settings: dict[str, Any]) -> None:
    for keys in ((), ("some-long-key",)):
        got = request("POST", "/look/api/walk", settings | {"keys": keys}, host=host, origin=origin, **KEY)
        assert got.status == 200 and not cors(got)


def test_a_rebound_name_is_not_our_origin() -> None:
    """A page at evil.example whose name points here now: origin and Host agree."""
    for keys, status in (((), 421), (("some-long-key",), 403)):
        got = request(settings={"keys": keys}, host="evil.example:8000", origin="http://evil.example:8000", **KEY)
        assert got.status == status


def test_allowed_origins_get_cors_with_preflight() -> None:
    settings = {"origins": (PAGE,), "keys": ("some-long-key",)}
    asked = request(
        "OPTIONS",
        settings=settings,
        origin=PAGE,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
        access_control_request_private_network="true",
    )
    assert asked.status == 204 and asked.body == b""  # without a key: browsers send none
    assert asked.headers["access-control-allow-origin"] == PAGE and asked.headers["vary"] == "Origin"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert asked.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in asked.headers
    sent = request(settings=settings, origin=PAGE, **KEY)
    assert sent.status == 200 and sent.headers["access-control-allow-origin"] == PAGE
    refused = request(settings=settings, origin=PAGE)  # the page may read why
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == PAGE
    assert request(settings=settings, origin="https://app.example.com.evil.example", **KEY).status == 403
    every = request(settings={"origins": ("*",)}, origin="http://evil.example")
    assert every.status == 200 and every.headers["access-control-allow-origin"] == "*"


def test_extensions_and_apps_of_the_user_are_no_web_pages() -> None:
    for origin in ("chrome-extension://abcdef", "moz-extension://1-2", "tauri://localhost", "vscode-webview://x"):
        got = request(origin=origin)
        assert got.status == 200 and got.headers["access-control-allow-origin"] == origin


def test_clients_that_are_no_browsers_send_no_origin() -> None:
    got = request(content_type="text/plain")
    assert got.status == 200 and not cors(got)


@pytest.mark.parametrize(
    "origin", ["app.example.com", "https://app.example.com/", "https://App.example.com", "https://", ""]
)
def test_an_origin_that_no_browser_would_send_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(UserError, match="--allow-origin"):
        check_binding(Settings(origins=(origin,)), no_auth=False)
    check_binding(Settings(origins=(PAGE, "*", "null", "http://localhost:3000")), no_auth=False)


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("allyouneed:8000", {"host": "0.0.0.0", "keys": ("some-long-key",)}, 200),  # a neighbour in a compose network
        ("allyouneed.prod.svc.cluster.local", {"host": "0.0.0.0", "keys": ("some-long-key",)}, 200),
        ("api.example.com", {"host": "0.0.0.0", "keys": ("some-long-key",)}, 200),  # a page under it has no key
        ("allyouneed:8000", {"host": "0.0.0.0"}, 200),  # --no-auth: nobody can own such a name
        ("allyouneed.prod.svc.cluster.local", {"host": "0.0.0.0"}, 200),
        ("host.docker.internal:8000", {"host": "::"}, 200),
        ("evil.example", {"host": "0.0.0.0"}, 421),
        ("internal.evil.example", {"host": "0.0.0.0"}, 421),
        ("", {"host": "0.0.0.0"}, 421),
        ("allyouneed:8000", {}, 421),  # on the loopback there are no neighbours
        ("api.example.com", {"hosts": ("api.example.com",)}, 200),
    ],
)
def test_names_under_which_neighbours_call(host: str, settings: dict[str, Any], status: int) -> None:
    assert request(settings=settings, host=host, **KEY).status == status
