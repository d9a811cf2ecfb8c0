"""Views as one HTML file that opens from disk: `allyouneed look … -o page.html`.

The file contains the documents that the page asks for: the first of each view, and those that clicks lead to (`follow`
of a view), as long as the file stays below `BUDGET`. What is not there is answered by the page with the Python line.
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from allyouneed.apps.inspect.assets import offline_page
from allyouneed.apps.inspect.views import find_view
from allyouneed.apps.inspect.views.document import Document
from allyouneed.apps.inspect.views.model import ViewModel, ViewRequest
from allyouneed.errors import UserError
from allyouneed.files import write_text

CLICKS = 2  # one after another, whose documents are in the file
BUDGET = 24 << 20  # characters of documents in a file; the first of each view is always there


def collect(models: Any, names: Sequence[str], request: Mapping[str, Any], lenient: bool = False) -> list[Document]:
    """The documents of these views: of one `ViewModel`, or of a list where the view compares. `lenient`: a view that
    does not suit the model is left out with a warning, as long as there is another."""
    found: list[Document] = []
    later: list[Wanted] = []
    problems: list[UserError] = []
    for name in names:
        view = find_view(name)
        asked = view.request.parse({key: value for key, value in request.items() if key in view.request.model_fields})
        try:
            starts = [{}] if view.start is None else list(view.start(models, asked))
            first = view.request.parse(_fields(asked) | starts[0])
            found.append(view.build(models, first))
        except UserError as error:
            problems.append(error)
            continue
        later += [Wanted(name, _fields(asked) | one, 1) for one in starts[1:]]
        later += _following(found[-1], first, 0)
    if problems and not (lenient and found):
        raise problems[0]
    for problem in problems:
        warnings.warn(f"one view is left out: {problem}", stacklevel=2)
    return [*found, *_followed(models, found, later)]


class Wanted(NamedTuple):
    """A document that clicks lead to, and how many."""

    view: str
    fields: dict[str, Any]
    clicks: int

    @property
    def key(self) -> str:
        return json.dumps([self.view, self.fields], sort_keys=True)


def _following(sent: Document, request: ViewRequest, clicks: int) -> Iterator[Wanted]:
    """What a document leads to. A lesson shows its views without a click."""
    name = sent["view"]
    view, after = find_view(name), clicks + (name != "lessons")
    if view.follow is None or after > CLICKS:
        return
    for other, one in view.follow(sent):
        yield Wanted(other, _of(request, other) | one, after)


def _followed(models: Any, found: list[Document], later: Iterable[Wanted]) -> Iterator[Document]:
    """The documents that clicks lead to, as many as fit; refused ones (a token that cannot be left out) are omitted."""
    first = {one["view"]: (number, one) for number, one in enumerate(found)}
    size, count = sum(map(_size, found)), len(found)
    waiting, seen = deque(later), set[str]()
    while waiting:
        wanted = waiting.popleft()
        if wanted.key in seen:
            continue
        seen.add(wanted.key)
        view = find_view(wanted.view)
        try:
            request = view.request.parse(wanted.fields)
            whole = view.build(models, request)
        except UserError:
            continue
        sent = _difference(whole, *first[view.name]) if view.name in first else whole
        first.setdefault(view.name, (count, whole))
        size, count = size + _size(sent), count + 1
        if size > BUDGET:
            return
        yield sent
        # CSV files are large; those of the views themselves are enough
        waiting += (one for one in _following(whole, request, wanted.clicks) if one.view != "value")


def _of(request: ViewRequest, view: str) -> dict[str, Any]:
    """The fields of a request that another view has too."""
    return {name: value for name, value in _fields(request).items() if name in find_view(view).request.model_fields}


def _difference(document: Document, number: int, base: Document) -> Document:
    """The document without what it shares with number `base` of the file."""
    data, shared = document["data"], base["data"]
    own = {name: value for name, value in data.items() if name not in shared or shared[name] != value}
    return document | {"data": own, "base": number}


def _fields(request: ViewRequest) -> dict[str, Any]:
    return request.model_dump(exclude_unset=True)


def _size(document: Document) -> int:
    return len(json.dumps(document, ensure_ascii=False))


def check_page_path(path: Path) -> None:
    """Refuse before any work what could not be written at its end."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{path}: expected the name of an .html file")
    if path.is_dir():
        raise UserError(f"{path}: a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder")


def save(documents: Sequence[Document], path: Path | str) -> Path:
    """Write the file; it appears when complete."""
    path = Path(path)
    check_page_path(path)
    write_text(path, offline_page(documents))
    return path


def view_model(predictor: Any, name: str | None = None) -> ViewModel:
    """A predictor as views see it; its name is that of its folder."""
    path = getattr(predictor.folder, "path", None)
    return ViewModel(name or (Path(path).name if path else "model"), predictor)
