"""The page as bytes: its stylesheet, its script, and the HTML around them, served or in one file.

The sources are in `page/`: page.html, style.css, app.js, `parts/` (components), `views/` (one file per view, found by
its name) and the strings of both languages. There is no build step: the script is these files one after the other,
each in a function of its own so that only the namespace `AYN` is shared.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from allyouneed.apps.inspect.views.document import Document

FOLDER = Path(__file__).parent / "page"
PARTS = ("tensor", "colour", "controls", "tokens", "formula", "heatmap", "charts", "media")
LANGUAGES = ("en", "zh")
# what both the served page and the offline file allow; the rest is refused
COMMON_POLICY = (
    "default-src 'none'; img-src 'self' data: blob:; media-src data: blob:; base-uri 'none'; form-action 'none'"
)
SERVED_POLICY = (
    f"{COMMON_POLICY}; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='%231557b0' "
    "d='M0 0h8v8H0zM8 8h8v8H8z'/%3E%3Cpath fill='%23b35806' d='M0 8h8v8H0z'/%3E%3C/svg%3E"
)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def style() -> str:
    return _read(FOLDER / "style.css")


@cache
def script() -> str:
    """The namespace first, then components, application and views."""
    views = sorted((FOLDER / "views").glob("*.js"))
    files = [*(FOLDER / "parts" / f"{name}.js" for name in PARTS), FOLDER / "app.js", *views]
    wrapped = (f"// {file.name}\n(() => {{\n{_read(file)}}})();\n" for file in files)
    return _read(FOLDER / "parts" / "base.js") + "".join(wrapped)


@cache
def strings() -> dict[str, dict[str, str]]:
    """Every visible string by language and key."""
    return {language: json.loads(_read(FOLDER / f"strings.{language}.json")) for language in LANGUAGES}


def inert_json(content: Any) -> str:
    """JSON that cannot end the element it stands in, whatever texts it contains."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    for char, escape in escapes.items():
        text = text.replace(char, escape)
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, as JSON escapes them


def _page(head: str, body: str, data: Document) -> str:
    parts = {
        "HEAD": f'<link rel="icon" href="{ICON}">\n{head}',
        "STRINGS": inert_json(strings()),
        "SCRIPT": body,
        "DOCUMENTS": inert_json(data),  # last: texts of documents are not searched for other marks
    }
    html = _read(FOLDER / "page.html")
    for name, part in parts.items():
        html = html.replace(f"<!--{name}-->", part, 1)
    return html


def served_page(views: Iterable[str]) -> str:
    """The page of a server; it asks for documents."""
    head = '<link rel="stylesheet" href="assets/page.css">'
    body = '<script src="assets/page.js"></script>'
    return _page(head, body, {"offline": False, "views": list(views), "documents": []})


def offline_page(documents: Sequence[Document]) -> str:
    """One file that needs nothing else: style and script inside, allowed by their hashes alone."""
    policy = f"{COMMON_POLICY}; script-src {_hash(script())}; style-src {_hash(style())}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style()}</style>'
    views = list(dict.fromkeys(one["view"] for one in documents))
    data = {"offline": True, "views": views, "documents": list(documents)}
    return _page(head, f"<script>{script()}</script>", data)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
