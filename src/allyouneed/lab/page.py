"""Pages of the lab: HTML without network, in English and Chinese, and tables and figures on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from allyouneed.training.reporting.page import TEMPLATE

RULES = """
html.en [lang=zh], html.zh [lang=en] { display: none } li { margin: .25rem 0 }
td { white-space: nowrap } th, th.number { vertical-align: bottom; white-space: normal; overflow-wrap: normal }
.wide { margin: 0 0 1.4rem }
"""
SWITCH = """
const page = document.documentElement, choose = word => { page.className = page.lang = word; };
choose((navigator.language || "").startsWith("zh") ? "zh" : "en");
document.getElementById("language").onclick = () => choose(page.lang === "zh" ? "en" : "zh");
"""


class Bilingual(NamedTuple):
    """A text in both languages."""

    en: str
    zh: str

    @property
    def html(self) -> str:
        if self.en == self.zh:
            return escape(self.en)
        return f'<span lang="en">{escape(self.en)}</span><span lang="zh">{escape(self.zh)}</span>'


def same(text: str) -> Bilingual:
    return Bilingual(text, text)


def heading(text: Bilingual) -> str:
    return f"<h2>{text.html}</h2>"


def paragraph(text: Bilingual) -> str:
    return f"<p>{text.html}</p>"


def bullets(texts: Iterable[Bilingual]) -> str:
    return "<ul>" + "".join(f"<li>{text.html}</li>" for text in texts) + "</ul>"


def table(heads: Sequence[Bilingual], rows: Sequence[Sequence[Bilingual]], bold: str = "") -> str:
    top = "".join(f"<th{' class=number' if at else ''}>{head.html}</th>" for at, head in enumerate(heads))
    lines = []
    for row in rows:
        weight = ' class="best"' if row[0].en == bold else ""
        cells = "".join(f"<td{' class=number' if at else ''}>{cell.html}</td>" for at, cell in enumerate(row))
        lines.append(f"<tr{weight}>{cells}</tr>")
    return f'<div class="wide"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def figures(plots: Sequence[tuple[Bilingual, str]]) -> str:
    shown = [f"<figure><figcaption>{title.html}</figcaption>{svg}</figure>" for title, svg in plots if svg]
    return f'<div class="plots">{"".join(shown)}</div>'


def document(title: Bilingual, body: Iterable[str]) -> str:
    """The whole page. It opens in the language of the browser; a button changes it."""
    style = TEMPLATE.read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    return (
        '<!doctype html>\n<html lang="en" class="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title.en)}</title>\n'
        f"<style>{style}{RULES}</style>\n</head>\n<body>\n"
        f'<header><h1>{title.html}</h1><button id="language" type="button">'
        f"{Bilingual('中文', 'English').html}</button></header>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main>\n<script>{SWITCH}</script>\n</body>\n</html>\n"
    )
