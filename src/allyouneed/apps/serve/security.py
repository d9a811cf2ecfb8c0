"""Who may ask: API keys, compared in constant time; the Host header, against DNS rebinding; origins of web pages."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

from allyouneed.apps.serve.bodies import off_loop, parse_fields, parse_form
from allyouneed.apps.serve.errors import LIBRE_ROUTES, ApiError
from allyouneed.apps.serve.settings import Limits, Settings
from allyouneed.errors import UserError

Headers = Mapping[bytes, bytes]
SCHEMES = ("bearer ", "deepl-auth-key ")
BODY_KEYS = ("api_key", "apiKey")  # LibreTranslate's clients in Python and JavaScript
# where a query may have a key, for a URL is written to logs: DeepLX, Apertium and LibreTranslate; deep-translator
QUERY_KEYS = dict.fromkeys(LIBRE_ROUTES, ("token", "key", *BODY_KEYS)) | {"/v2/translate": ("auth_key",)}
MIN_KEY = 8  # characters
KNOWN_HOSTS = 256  # that are not checked again
# endings of names that nobody can register, so that no page on the internet has one
LOCAL_NAMES = (".local", ".internal", ".localhost", ".home.arpa")
ALLOWED_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
EXPOSED = "X-Ignored-Fields, X-Exact, Retry-After"


def header(headers: Headers, name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


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

    def client(self, headers: Headers, path: str, query: bytes) -> str | None:
        """The client that a request belongs to; None if it has no key. A wrong one gets status 401."""
        given = header(headers, b"authorization")
        for scheme in SCHEMES:
            if given.lower().startswith(scheme):
                given = given[len(scheme) :].strip()
                break
        else:
            given = "" if " " in given else given  # another scheme's, for a proxy
        given = given or header(headers, b"x-api-key")
        if not given and query and path in QUERY_KEYS:
            given = next((value for name, value in parse_form(query) if name in QUERY_KEYS[path]), "")
        return self.named(given) if given else None

    def named(self, given: str) -> str:
        """The client with this key."""
        number = self.find(given)
        if number is None:
            raise ApiError("wrong API key", 401, code="invalid_api_key") if given else missing_key()
        return f"key {number}"


async def body_key(headers: Headers, body: bytes, limits: Limits) -> str:
    """The key in a JSON or form body, where LibreTranslate's clients send it."""
    kind = header(headers, b"content-type")
    try:
        found = await off_loop(len(body), parse_fields, body, kind, b"", limits)
    except ApiError:  # what is wrong with a body is told to those who have a key
        return ""
    return next((key for name in BODY_KEYS if isinstance(key := found.get(name), str)), "")


def missing_key() -> ApiError:
    return ApiError("no API key; send `Authorization: Bearer KEY`", 401, code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_binding(settings: Settings, no_auth: bool) -> None:
    """Refuse to listen on other interfaces than the loopback without keys."""
    for origin in settings.origins:
        check_origin(origin)
    if short := [key for key in settings.keys if len(key) < MIN_KEY]:
        raise UserError(f"an API key has {len(short[0])} characters; use at least {MIN_KEY}")
    if not settings.keys and not no_auth and not is_loopback(settings.host):
        raise UserError(
            f"--host {settings.host}: other machines could use the server without a key; set --key-file FILE or the "
            "variable ALLYOUNEED_API_KEY, or allow it with --no-auth"
        )


def check_origin(origin: str) -> None:
    """Refuse what is no origin as browsers write it."""
    found = urlsplit(origin)
    if origin not in ("*", "null") and (not found.scheme or not found.netloc or origin != _origin(found)):
        raise UserError(f"--allow-origin {origin}: expected an origin such as https://app.example.com, or '*'")


def _origin(found: SplitResult) -> str:
    return f"{found.scheme}://{found.netloc}".lower()


class OriginPolicy:
    """From where requests may come. A page in a browser may point a name of its own at this address, but it cannot
    change the Host header; and it may send requests from elsewhere, but it cannot change the Origin header."""

    def __init__(self, settings: Settings) -> None:
        self.names = {"localhost", settings.host.lower(), *map(str.lower, settings.hosts)}
        self.origins = frozenset(origin.lower() for origin in settings.origins)
        # neighbours call a server in a container by a name of their network; on the loopback there are none
        self.local_names = not is_loopback(settings.host)
        self.keyed = bool(settings.keys)
        self.hosts = set[bytes]()  # Host headers that were let in

    def check_host(self, headers: Headers) -> None:
        """With keys any name will do: a page under a name of its own has none."""
        host = header(headers, b"host")
        if not self.keyed and not self._is_ours(_name(host)):
            what = f"unknown host {_name(host)[:100]!r} in the Host header; allow it with --allow-host NAME"
            raise ApiError(what, 421, code="unknown_host")
        if len(self.hosts) < KNOWN_HOSTS:
            self.hosts.add(headers.get(b"host", b""))

    def check_origin(self, headers: Headers, is_page: bool) -> list[tuple[bytes, bytes]]:
        """CORS headers of the answer. Origins that were not allowed are refused. `is_page`: a page may link to it."""
        origin, site = header(headers, b"origin").lower(), header(headers, b"sec-fetch-site")
        if not origin:
            if site == "cross-site" and not is_page and "*" not in self.origins:
                raise _foreign("another site")
            return []
        scheme, _, here = origin.partition("://")
        is_web = scheme in ("http", "https", "null")
        host = header(headers, b"host").lower()
        # a proxy may leave the port out of Host
        same = here == host or (":" not in host and _name(here) == host) or site == "same-origin"
        if same and is_web and self._is_ours(_name(host)):
            return []
        hint = f"--allow-host {_name(host)[:100]}" if same and is_web else "--allow-origin ORIGIN"
        if "*" in self.origins:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED.encode())]
        if origin in self.origins or not is_web:  # extensions and apps that the user has installed
            return [
                (b"access-control-allow-origin", headers[b"origin"]),
                (b"access-control-expose-headers", EXPOSED.encode()),
                (b"vary", b"Origin"),
            ]
        raise _foreign(repr(origin[:100]), hint)

    def _is_ours(self, name: str) -> bool:
        if name in self.names or "*" in self.names:
            return True
        if self.local_names and name and ("." not in name or name.endswith(LOCAL_NAMES)):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def preflight(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Further headers of the answer to a browser that asks what an allowed origin may send."""
    found = [(b"access-control-allow-methods", ALLOWED_METHODS.encode()), (b"access-control-max-age", b"600")]
    if asked := headers.get(b"access-control-request-headers"):
        found.append((b"access-control-allow-headers", asked))
    if b"access-control-request-private-network" in headers:
        found.append((b"access-control-allow-private-network", b"true"))
    return found


def _name(host: str) -> str:
    """Without the port."""
    return (host.rsplit(":", 1)[0] if not host.endswith("]") and ":" in host else host).lower()


def _foreign(where: str, hint: str = "--allow-origin ORIGIN") -> ApiError:
    return ApiError(
        f"requests of web pages from {where} are refused; allow them with {hint}", 403, code="foreign_origin"
    )
