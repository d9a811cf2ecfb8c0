"""Pages to browse: the text files of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allyouneed.errors import UserError

SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class TextPage:
    """A page: its title (the first line, or the file's name if that is empty), and all its lines."""

    title: str
    lines: tuple[str, ...]
    path: str  # relative to the folder

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def read_pages(folder: Path | str) -> list[TextPage]:
    """The .txt and .md files of a folder and of those in it, sorted by path. Hidden files are left out."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of pages")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix.lower() in SUFFIXES]
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not files:
        raise UserError(f"{folder}: no pages; put text files there ({', '.join(SUFFIXES)})")
    return [_read(path, path.relative_to(folder)) for path in files]


def _read(path: Path, name: Path) -> TextPage:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; convert it with `iconv`, or move it away") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    lines = tuple(line.rstrip() for line in text.strip("\n").split("\n"))
    return TextPage(lines[0].lstrip("# ").strip() or name.stem, lines, name.as_posix())
