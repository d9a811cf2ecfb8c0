"""A page inside a notebook: `model.look("机器学习很有趣")` as the last line of a cell."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allyouneed.apps.inspect.assets import offline_page
from allyouneed.apps.inspect.offline import collect, save, view_model
from allyouneed.apps.inspect.views.document import Document

INSIDE = ("walk", "truth", "mixing", "why", "what_if")  # the views of one sentence
HEIGHT = 820  # CSS pixels


class Page:
    """Documents as a page. Shown by Jupyter, VS Code and Colab in a frame that can run only its own script; `save`
    writes the same as a file."""

    def __init__(self, documents: Sequence[Document], height: int = HEIGHT) -> None:
        self.documents, self.height = list(documents), height

    def _repr_html_(self) -> str:
        content = html.escape(offline_page(self.documents), quote=True)
        return (
            f'<iframe srcdoc="{content}" sandbox="allow-scripts allow-downloads" width="100%" height="{self.height}" '
            'style="border:1px solid #8884;border-radius:6px" title="allyouneed"></iframe>'
        )

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(one["view"] for one in self.documents))
        return f"Page({names}; {len(self.documents)} documents)"

    def save(self, path: Path | str) -> Path:
        """Write one .html file that opens from disk, without a server."""
        return save(self.documents, path)


def look(predictor: Any, text: str | None = None, views: str | Sequence[str] | None = None, **request: Any) -> Page:
    """A page that shows how the model reads this text, for a notebook; `.save("page.html")` writes it as a file.
    `views`: their names (docs/seeing.md); default: all views of one input. `request`: fields of their requests, such
    as `target`."""
    names = INSIDE if views is None else (views,) if isinstance(views, str) else tuple(views)
    given = request if text is None else {"text": text} | request
    return Page(collect(view_model(predictor), names, given, lenient=views is None))
