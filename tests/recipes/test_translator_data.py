"""recipes/translator: what collect.py writes, and that the licence of the weights names every source."""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "translator"
Collect = Callable[[dict[str, tuple[str, str]]], Path]

HELD_OUT = "The old lighthouse keeper counted every ship."
WIKI = (
    f"The river rises in the northern hills. It then flows through two lakes. {HELD_OUT} Its water is used by farms. "
    "The valley was settled by fishers () in the ninth century. Lists have no verbs | and are dropped. "
) * 8
PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8"

msgid "The hunter follows the bear."
msgstr "Der Jäger folgt "
"dem Bären."

msgid "The old lighthouse keeper counted every ship!"
msgstr "Der alte Leuchtturmwärter zählte jedes Schiff."

#, fuzzy
msgid "The swan flies south."
msgstr "Der Schwan fliegt."
"""


@pytest.fixture
def collect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Collect:
    """Runs the command on a list of sources {name: (use, origin, domain)}; gives the folder it wrote to."""
    monkeypatch.syspath_prepend(RECIPE)
    import collect as command

    tests = tmp_path / "data" / "mt" / "en-de"
    tests.mkdir(parents=True)
    (tests / "tatoeba.test.tsv.gz").write_bytes(gzip.compress(f"Das bleibt draußen.\t{HELD_OUT}\n".encode()))

    def run(sources: dict[str, tuple[str, ...]]) -> Path:
        rows = ["source\tuse\tdomain\tlicence\torigin"]
        for name, (use, origin, *domain) in sources.items():
            rows.append(f"{name}\t{use}\t{domain[0] if domain else 'extra'}\tCC0\t{origin}")
        (tmp_path / "sources.tsv").write_text("\n".join(rows) + "\n", "utf-8")
        folders = {"snapshots": "", "packages": "", "data": "data", "corpora": "corpora", "output": "out"}
        given = [f"--{name}={tmp_path / folder}" for name, folder in folders.items()]
        monkeypatch.setattr(sys, "argv", ["collect.py", f"--sources={tmp_path / 'sources.tsv'}", *given])
        command.main()
        return tmp_path / "out"

    return run


def repository(folder: Path, files: dict[str, str]) -> str:
    """The commit of a new repository with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(folder), *author, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "x")
    return git("rev-parse", "HEAD")


def read(path: Path) -> list[str]:
    return sorted(gzip.decompress(path.read_bytes()).decode("utf-8").splitlines())


def test_files_of_repositories_are_written_without_the_test_sets(collect: Collect, tmp_path: Path) -> None:
    documents = {
        "AA/wiki_00": f'<doc id="1" url="u" title="River">\nRiver\n\n{WIKI}\n</doc>\n',
        "AA/wiki_02": json.dumps({"title": "Hill", "text": "Hill\n\n" + WIKI.replace("river", "stream")}) + "\n",
        "AA/wiki_01": f'<doc id="2" url="u" title="Sea">\nSea\n\n{WIKI.replace("river", "sea")}\n</doc>\n',
    }
    wiki = repository(tmp_path / "a+wiki", documents)
    repository(tmp_path / "a+wiki", {"AA/wiki_04": documents["AA/wiki_01"]})  # after the commit that is read
    tree = repository(
        tmp_path / "a+tree",
        {
            "x-dev.conllu": "# sent_id = 1\n# text = Der Bach fließt durch ein Tal.\n1\tDer\n\n"
            "# text = Das bleibt draußen!\n\n# text = Ein Bruchstück ohne Ende\n",
            "x-train.conllu": "# text = Der Zug hält nicht in jedem Dorf.\n",
        },
    )
    licences = {"free": "CC BY-SA", "closed": "CC BY-NC-ND"}
    sky = repository(
        tmp_path / "a+sky",
        {f"{name}/description.md": f"# A\n## License\n{licence}\n" for name, licence in licences.items()}
        | {"free/po/de.po": PO, "free/po/fr.po": "", "free/po/zh_CN.po": 'msgid "Hunter"\nmsgstr "獵人星座"\n'}
        | {"closed/po/de.po": 'msgid "A wolf howls."\nmsgstr "Ein Wolf heult."\n'},
    )
    output = collect(
        {
            "enwiki": ("monolingual", f"a/wiki@{wiki}: files"),
            "ud-gsd-de": ("monolingual", f"a/tree@{tree[:7]}"),
            "stellarium-skycultures": ("collected", f"a/sky@{sky}"),
            "dict-freedict": ("words", "of words.py"),
        }
    )
    assert read(output / "en.mono.txt.gz") == [
        "It then flows through two lakes.",
        "Its water is used by farms.",
        "The river rises in the northern hills.",
        "The stream rises in the northern hills.",
        "The valley was settled by fishers in the ninth century.",
    ]
    assert read(output / "de.mono.txt.gz") == ["Der Bach fließt durch ein Tal."]
    assert read(output / "en-de.extra.tsv.gz") == ["The hunter follows the bear.\tDer Jäger folgt dem Bären."]
    assert read(output / "en-zh.extra.tsv.gz") == ["Hunter\t猎人星座"]
    assert json.loads((output / "collected.json").read_text())["en.mono.txt.gz"] == {"enwiki": 5}
    assert not (output / "en-de.names.tsv.gz").exists()


def test_names_of_packages(collect: Collect, tmp_path: Path) -> None:
    countries = [{"name": {"common": "Chad", "official": "Republic of Chad"}, "translations": {"deu": {}}}]
    countries[0]["translations"]["deu"] = {"common": "Tschad", "official": "Republik Tschad"}
    (tmp_path / "world-countries-5.1.0.tgz").write_bytes(
        archive({"package/countries.json": json.dumps(countries).encode()})
    )
    data = archive(
        {"./usr/share/locale/fr/LC_MESSAGES/iso_639-2.mo": catalog({"": "head", "lang\x04Dutch": "néerlandais"})}
    )
    members = {"debian-binary": b"2.0", "data.tar.gz": data}
    packed = b"".join(
        f"{name:<16}{0:<32}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
        for name, content in members.items()
    )
    (tmp_path / "iso-codes_4.15_all.deb").write_bytes(b"!<arch>\n" + packed)
    output = collect({"world-countries": ("names", "npm"), "iso-codes": ("names", "Debian")})
    assert read(output / "en-de.names.tsv.gz") == ["Chad\tTschad", "Republic of Chad\tRepublik Tschad"]
    assert read(output / "en-fr.names.tsv.gz") == ["Dutch\tnéerlandais"]


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def catalog(entries: dict[str, str]) -> bytes:
    """A .mo file: header, two tables of (size, position), the texts."""
    texts = [text.encode() for column in (entries.keys(), entries.values()) for text in column]
    at = 28 + 8 * len(texts)
    tables = b""
    for text in texts:
        tables += struct.pack("<2I", len(text), at)
        at += len(text) + 1
    head = struct.pack("<7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0)
    return head + tables + b"".join(text + b"\0" for text in texts)


def test_everything_missing_is_reported_at_once(
    collect: Collect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository(tmp_path / "a+tree", {"x-dev.conllu": ""})
    with pytest.raises(SystemExit) as stopped:
        collect(
            {
                "enwiki": ("monolingual", "a/wiki@1234567"),
                "ud-gsd-de": ("monolingual", "a/tree@1234567"),
                "cldr-names": ("names", "npm"),
                "dewikki": ("monolingual", "a/wiki@1234567"),
            }
        )
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert f"git clone --bare https://github.com/a/wiki {tmp_path / 'a+wiki'}" in lines[0]
    assert "with the commit 1234567" in lines[1]
    assert "cldr-localenames-full, cldr-dates-full, cldr-subdivisions-full" in lines[2]
    assert "unknown source 'dewikki'" in lines[3]
    assert not (tmp_path / "out").exists()


def test_the_licence_names_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPE)
    import card
    import collect
    from pairs import read_sources

    rows = read_sources()
    licence = card.licence()
    assert len({row["source"] for row in rows}) == len(rows) > 90
    for row in rows:
        assert all(row.values()), row
        assert f"| {row['source']} | {row['use']} | {row['domain']} | {row['licence']} |" in licence
    used = {kind: {row["source"] for row in rows if row["use"] == kind} for kind in collect.KNOWN}
    assert used == {kind: set(names) for kind, names in collect.KNOWN.items()}
