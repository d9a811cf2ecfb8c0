"""Who may ask: API keys, compared in constant time, and the Host header, against DNS rebinding."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Iterable, Sequence
from urllib.parse import parse_qs

from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.settings import Settings
from allyouneed.errors import UserError

Headers = Iterable[tuple[bytes, bytes]]
SCHEMES = ("bearer ", "deepl-auth-key ")
QUERY_KEYS = ("token", "key", "api_key")  # DeepLX, Apertium, LibreTranslate
MIN_KEY = 8  # characters


def header(headers: Headers, name: bytes) -> str:
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return ""


class Keys:
    """API keys, kept as digests: comparing digests takes the same time whatever the key and its length."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self.digests)

    def find(self, given: str) -> int | None:
        """The index of a key. All keys are compared, whichever matches."""
        digest, found = _digest(given), None
        for number, known in enumerate(self.digests):
            if hmac.compare_digest(digest, known):
                found = number
        return found

    def client(self, headers: Headers, query: bytes, beside: str = "") -> str:
        """The client that a request belongs to, or an error with status 401. `beside`: a key from elsewhere."""
        given = header(headers, b"authorization")
        for scheme in SCHEMES:
            if given.lower().startswith(scheme):
                given = given[len(scheme) :].strip()
                break
        given = given or header(headers, b"x-api-key")
        if not given:
            fields = parse_qs(query.decode("latin-1"), max_num_fields=64)
            given = next((fields[name][0] for name in QUERY_KEYS if name in fields), beside)
        number = self.find(given)
        if number is None:
            what = "wrong API key" if given else "no API key; send `Authorization: Bearer KEY`"
            raise ApiError(what, 401, code="invalid_api_key")
        return f"key {number}"


def body_key(headers: Headers, body: bytes) -> str:
    """`api_key` of a JSON or form body, where LibreTranslate's clients send it."""
    if header(headers, b"content-type").startswith("application/x-www-form-urlencoded"):
        found = parse_qs(body.decode("latin-1"), max_num_fields=64).get("api_key", [""])[0]
        return found
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    given = tree.get("api_key") if isinstance(tree, dict) else None
    return given if isinstance(given, str) else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_binding(settings: Settings, no_auth: bool) -> None:
    """Refuse to listen on other interfaces than the loopback without keys."""
    if short := [key for key in settings.keys if len(key) < MIN_KEY]:
        raise UserError(f"an API key has {len(short[0])} characters; use at least {MIN_KEY}")
    if not settings.keys and not no_auth and not is_loopback(settings.host):
        raise UserError(
            f"--host {settings.host}: other machines could use the server without a key; set --key-file FILE or the "
            "variable ALLYOUNEED_API_KEY, or allow it with --no-auth"
        )


def check_host(settings: Settings, headers: Headers) -> None:
    """A page in a browser may point a name of its own at this address, but it cannot change the Host header. IP
    addresses are no such names."""
    given = header(headers, b"host")
    name = given.rsplit(":", 1)[0] if not given.endswith("]") and ":" in given else given
    if "*" in settings.hosts or name.lower() in ("localhost", settings.host, *map(str.lower, settings.hosts)):
        return
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        raise ApiError(
            f"unknown host {name[:100]!r} in the Host header; allow it with --allow-host NAME", 421, code="unknown_host"
        ) from None
