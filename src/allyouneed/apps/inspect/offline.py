"""Views as one HTML file that opens from disk: `allyouneed look … -o page.html`.

The file contains the documents that the page asks for: the first of each view, and those that clicks lead to (`follow`
of a view), as long as the file stays below `BUDGET`. What is not there is answered by the page with the Python line.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allyouneed.apps.inspect.assets import offline_page
from allyouneed.apps.inspect.views import find_view
from allyouneed.apps.inspect.views.document import Document
from allyouneed.apps.inspect.views.model import ViewModel, ViewRequest
from allyouneed.errors import UserError
from allyouneed.files import write_text

BUDGET = 24 << 20  # characters of documents in a file; the first of each view is always there


def collect(models: Any, names: Sequence[str], request: Mapping[str, Any], lenient: bool = False) -> list[Document]:
    """The documents of these views: of one `ViewModel`, or of a list where the view compares. `lenient`: a view that
    does not suit the model is left out with a warning, as long as there is another."""
    found: list[Document] = []
    later: list[tuple[str, Document]] = []
    problems: list[UserError] = []
    for name in names:
        view = find_view(name)
        asked = view.request.parse({key: value for key, value in request.items() if key in view.request.model_fields})
        try:
            starts = [{}] if view.start is None else list(view.start(models, asked))
            found.append(view.build(models, view.request.parse(_fields(asked) | starts[0])))
        except UserError as error:
            problems.append(error)
            continue
        more = [(name, one) for one in starts[1:]] + ([] if view.follow is None else list(view.follow(found[-1])))
        later += [(other, _of(asked, other) | one) for other, one in more]
    if problems and not (lenient and found):
        raise problems[0]
    for problem in problems:
        warnings.warn(f"one view is left out: {problem}", stacklevel=2)
    return [*found, *_followed(models, found, later)]


def _followed(models: Any, found: list[Document], later: Iterable[tuple[str, Document]]) -> Iterator[Document]:
    """The documents that clicks lead to, as many as fit; refused ones (a token that cannot be left out) are omitted."""
    first = {one["view"]: number for number, one in enumerate(found)}
    size = sum(map(_size, found))
    for name, values in later:
        view = find_view(name)
        try:
            document = view.build(models, view.request.parse(values))
        except UserError:
            continue
        if name in first:
            document = _difference(document, first[name], found[first[name]])
        size += _size(document)
        if size > BUDGET:
            return
        yield document


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
