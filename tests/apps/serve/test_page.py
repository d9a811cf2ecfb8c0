"""The page of a server: open without a key, strict about what it may load, and its views protected like any route."""

from __future__ import annotations

import re
from pathlib import Path
from threading import current_thread

import httpx
import pytest

from allyouneed.apps.inspect import assets
from allyouneed.apps.inspect.inside.execute import forward_pass
from allyouneed.apps.inspect.views import _VIEWS, view
from allyouneed.apps.inspect.views.document import document
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import ViewModel
from served import Running, served_client

KEY = "secret-key"


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that says what it was asked for, and in which thread its forward passes run."""
    monkeypatch.setattr("allyouneed.apps.inspect.views._VIEWS", dict(_VIEWS))

    @view("echo", InputRequest)
    def build(model: ViewModel, request: InputRequest) -> dict[str, object]:
        found = {"input": request.read(model.predictor), "thread": forward_pass(current_thread)().name}
        return document("echo", model, request, "", found)


def test_the_page_and_its_assets_are_served_with_a_strict_policy(client: httpx.Client) -> None:
    for path, media in (("/", "text/html"), ("/assets/page.js", "text/javascript"), ("/assets/page.css", "text/css")):
        found = client.get(path)
        assert found.status_code == 200 and found.headers["content-type"].startswith(media)
        policy = found.headers["content-security-policy"]
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        for rule in (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "frame-ancestors 'none'",
        ):
            assert rule in policy.split("; ")
        assert found.headers["x-content-type-options"] == "nosniff"
        again = client.get(path, headers={"if-none-match": found.headers["etag"]})
        assert again.status_code == 304 and not again.content
    html = client.get("/").text
    assert "<style" not in html and html.count("<script") == 3 and 'script src="assets/page.js"' in html
    assert client.get("/assets/page.js").text == assets.script()


def test_views_of_two_models_and_of_runs_are_shown_where_there_are_some(
    client: httpx.Client, folders: dict[str, Path], tmp_path: Path
) -> None:
    with served_client({"lm": folders["lm"]}, runs=tmp_path) as (_, other):
        alone, several = ((re.search(r'"views":(\[.*?\])', one.get("/").text) or [""])[1] for one in (other, client))
    assert '"compare"' in several and '"replay"' not in several
    assert '"replay"' in alone and '"compare"' not in alone


@pytest.mark.parametrize("name", ["app.js", "..%2Fpage.html", "page.js%00", "%2e%2e%2f%2e%2e%2fpyproject.toml"])
def test_other_files_are_not_served(client: httpx.Client, name: str) -> None:
    assert client.get(f"/assets/{name}").status_code == 404


def test_with_keys_the_page_is_open_and_its_views_are_not(folders: dict[str, Path], echo: None) -> None:
    with served_client({"lm": folders["lm"]}, keys=(KEY,)) as (_, client):
        assert client.get("/").status_code == client.get("/assets/page.js").status_code == 200
        assert client.post("/").status_code == 401
        for path in ("/look/api/echo", "/look/api/none"):
            assert client.post(path, json={"text": "a"}).status_code == 401
        assert client.get("/v1/models").status_code == 401
        allowed = client.post("/look/api/echo", json={"text": "a"}, headers={"authorization": f"Bearer {KEY}"})
        assert allowed.status_code == 200


def test_forward_passes_of_a_view_run_in_the_thread_of_the_model(client: httpx.Client, echo: None) -> None:
    found = client.post("/look/api/echo", json={"text": "a cat", "model": "lm"}).json()
    assert found["data"] == {"input": "a cat", "thread": "engine loop of lm"}
    assert found["view"] == "echo" and found["request"] == {"text": "a cat", "model": "lm"}
    assert found["model"]["task"] == "causal-lm" and found["model"]["parameters"] > 0


@pytest.mark.parametrize(
    ("name", "body", "status", "said"),
    [
        ("eco", {"text": "a"}, 404, "unknown view 'eco' (did you mean 'echo'?)"),
        ("echo", {"text": "a", "model": "nobody"}, 404, "unknown model 'nobody'"),
        ("echo", {"txt": "a"}, 400, "txt: unknown field (allowed:"),
        ("echo", {"text": 5}, 400, "text: Input should be a valid string"),
        ("echo", {}, 400, "expected one input (text, image or sound), found nothing"),
        ("echo", {"text": "a", "image": "b"}, 400, "found text and image"),
        ("echo", {"text": " \n"}, 400, "the text is empty"),
        ("echo", {"text": "cat " * 3000}, 400, "at most 256 can be shown, shorten it"),
        ("echo", {"text": "x" * 1_000_001}, 400, "1000001 characters, the limit is 1000000"),
        ("echo", {"image": "http://example.com/a.png"}, 400, "other URLs and paths are not opened"),
        ("echo", {"image": "/etc/passwd"}, 400, "image: "),
        ("echo", {"sound": "QUJD"}, 400, "sound"),
        ("echo", [1], 400, ""),
    ],
)
def test_wrong_requests_get_one_message(
    client: httpx.Client, echo: None, name: str, body: object, status: int, said: str
) -> None:
    found = client.post(f"/look/api/{name}", json=body)
    assert found.status_code == status
    assert said in found.json()["error"]["message"]


def test_a_walk_through_a_served_model_follows_its_own_answer(client: httpx.Client) -> None:
    asked = {"text": "a cat sat", "model": "translator"}
    found = client.post("/look/api/walk", json=asked).json()["data"]
    assert [one["name"] for one in found["boxes"]][-1] == "head" and found["stacks"] == {"encoder": 1, "decoder": 1}
    answer = client.post(
        "/v1/completions", json={"model": "translator", "prompt": "a cat sat", "temperature": 0, "max_tokens": 9}
    ).json()
    chosen = [one["id"] for one in found["answers"]]
    assert len(chosen) >= answer["usage"]["completion_tokens"] and len(found["steps"]) == len(chosen)


def test_views_do_not_hold_up_the_health_of_the_server(server: Running, client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/health", "/v1/models"):
        assert client.get(path).status_code == 200
