"""Files of git repositories at a commit, read from clones without a working copy."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allyouneed.errors import UserError

ORIGIN = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)@(?P<commit>[0-9a-f]{7,40})\b")
LARGEST = 4 * 1024 * 1024  # bytes of a file that is read; larger ones would outweigh the rest of their source


@dataclass(frozen=True)
class Repository:
    """A clone, bare or not, of `OWNER/NAME`: the folder OWNER+NAME of `snapshots`."""

    owner: str
    name: str
    commit: str
    snapshots: Path

    @classmethod
    def parse(cls, origin: str, snapshots: Path) -> Repository:
        found = ORIGIN.match(origin)
        if found is None:
            raise UserError(f"the origin of a source must begin with OWNER/NAME@COMMIT, got {origin!r}")
        return cls(found["owner"], found["name"], found["commit"], snapshots)

    @property
    def folder(self) -> Path:
        return self.snapshots / f"{self.owner}+{self.name}"

    def check(self) -> None:
        """Raises UserError if the commit cannot be read."""
        url = f"https://github.com/{self.owner}/{self.name}"
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} does not exist: git clone --bare {url} {self.folder}")
        if self._git("cat-file", "-e", f"{self.commit}^{{commit}}").returncode:
            raise UserError(f"{self.folder} is not a clone of {url} with the commit {self.commit}")

    def files(self, pattern: str) -> Iterator[tuple[str, bytes]]:
        """Path and content of the files whose path has the pattern, in the order of paths; not the LARGEST."""
        listing = self._git("ls-tree", "-r", "-l", "-z", self.commit).stdout.decode("utf-8", "surrogateescape")
        chosen = []
        for line in listing.split("\0")[:-1]:
            about, path = line.split("\t", 1)
            _, _, blob, size = about.split()
            if size.isdigit() and int(size) < LARGEST and re.search(pattern, path):
                chosen.append((path, blob))
        if not chosen:
            raise UserError(f"{self.folder} has no file like {pattern} in the commit {self.commit}")
        command = [*self._command, "cat-file", "--batch"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            for path, blob in chosen:
                process.stdin.write(f"{blob}\n".encode())
                process.stdin.flush()
                _, _, length = process.stdout.readline().split()
                yield path, process.stdout.read(int(length))
                process.stdout.read(1)  # the line break after the content

    def texts(self, pattern: str) -> Iterator[tuple[str, str]]:
        for path, content in self.files(pattern):
            yield path, content.decode("utf-8", "replace")

    @property
    def _command(self) -> list[str]:
        work = self.folder / ".git"
        return ["git", "--git-dir", str(work if work.exists() else self.folder)]

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*self._command, *arguments], capture_output=True)
