"""Which task the columns of a file suggest: a table of rules, the first that fits is taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from allyouneed.apps.propose.facts import PLAIN, TAGGED, ColumnFacts, DataFacts, FileFacts
from allyouneed.data.files.lines import inner_suffix
from allyouneed.data.files.readers import OBJECT_SUFFIXES
from allyouneed.errors import UserError, near
from allyouneed.tasks.task import Task

LABEL_NAMES = re.compile(r"label|class|category|target|sentiment|intent|topic|rating|stars|y|标签|类别", re.IGNORECASE)
SCORE_NAMES = re.compile(r"score|similarity|sim|relatedness|label|相似度|分数", re.IGNORECASE)
SOURCE_NAMES = re.compile(r"source|src|input|question|text|document|article|wrong|from|prompt", re.IGNORECASE)


QUERY_NAMES = re.compile(r"query|queries|anchor|查询", re.IGNORECASE)
MOST_PARTS = 200  # labels that texts have several of
WORD = 15  # characters: shorter texts may be words in two spellings
CHANGED = 0.45  # the most of a text that a correction changes
MOST_CLASSES_IN_NUMBERS = 3  # of two texts: more numbers are a scale


@dataclass(frozen=True)
class Choice:
    """A task, the keys of its data entries, and why. `texts`: the columns that are read; `label`: the one with classes
    or tags."""

    task: str
    why: str
    entry: dict[str, Any] = field(default_factory=dict)
    texts: tuple[ColumnFacts, ...] = ()
    label: ColumnFacts | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the task
    aligned: tuple[FileFacts, ...] = ()
    others: tuple[str, ...] = ()  # tasks that fit as well


def task_type(name: str) -> type[Task]:
    """The task of this name."""
    found = Task.find(name)
    assert found is not None
    return found


Rule = Callable[[DataFacts], Choice | None]


def choose(facts: DataFacts, task: str | None = None) -> Choice:
    """The first rule that fits, or the first for this task."""
    found = [choice for rule in RULES for choice in [rule(facts)] if choice is not None and choice.task in Task.known()]
    if task is not None:
        if Task.find(task) is None:
            raise UserError(f"--task: unknown task {task!r}{near(task, Task.known())}")
        kind = task_type(task).files
        fitting = [one for one in found if one.task == task or task_type(one.task).files is kind]
        if not fitting:
            seen = ", ".join(map(str, facts.first.columns))
            raise UserError(f"--task {task}: reads {kind.examples}, which the columns ({seen}) do not look like")
        one = fitting[0]
        return one if one.task == task else Choice(task, "you named it", one.entry, one.texts, one.label)
    if not found:
        seen = ", ".join(map(str, facts.first.columns))
        raise UserError(f"{facts.first.file}: no task fits these columns ({seen}); name one with --task")
    more = (*found[0].others, *(one.task for one in found[1:]))
    others = tuple(dict.fromkeys(task for task in more if task != found[0].task))
    return Choice(**{**vars(found[0]), "others": others})


def _entry(facts: DataFacts, *columns: ColumnFacts) -> dict[str, Any]:
    """The keys that select these columns."""
    names = [column.name for column in columns]
    return {"keys" if inner_suffix(facts.first.file) in OBJECT_SUFFIXES else "columns": names}


def _texts(facts: DataFacts) -> list[ColumnFacts]:
    return [column for column in facts.first.columns.values() if column.is_text]


def _ordered(columns: list[ColumnFacts]) -> list[ColumnFacts]:
    """Sources first, where the names tell; else as in the file."""
    return sorted(columns, key=lambda column: not SOURCE_NAMES.fullmatch(str(column.name)))


def _tagged_lines(facts: DataFacts) -> Choice | None:
    if facts.first.shape != TAGGED:
        return None
    tags, words = facts.first.columns["tags"], facts.first.columns["words"]
    with facts.first.file.path.open(encoding=facts.first.file.encoding or "utf-8", errors="replace") as lines:
        count = len(next(line for line in lines if line.strip() and not line.startswith("-DOC")).split())
    entry = {"columns": [0, count - 1]} if count > 2 else {}
    return Choice("tagging", f"every word has one of {tags.distinct} tags", entry, (words,), tags)


def _tagged_lists(facts: DataFacts) -> Choice | None:
    lists = [column for column in facts.first.columns.values() if column.is_list]
    pairs = [
        (words, tags)
        for words in lists
        for tags in lists
        if words is not tags and len(words.sample) == len(tags.sample) and "tag" in str(tags.name).lower()
    ]
    if not pairs or not all(isinstance(word, str) for word in pairs[0][0].sample):
        return None
    words, tags = pairs[0]
    return Choice("tagging", "two lists of equal length in every row", _entry(facts, words, tags), (words,))


def _chats(facts: DataFacts) -> Choice | None:
    for column in facts.first.columns.values():
        if column.is_list and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in column.sample):
            entry = {} if column.name == "messages" else {"key": column.name}
            return Choice("chat", "lists of messages with roles", entry, (column,))
    return None


def _comparisons(facts: DataFacts) -> Choice | None:
    columns = facts.first.columns
    if not {"chosen", "rejected", "prompt"} <= columns.keys():
        return None
    texts = tuple(columns[name] for name in ("prompt", "chosen", "rejected"))
    return Choice("preference", "prompts with a chosen and a rejected answer", {}, texts)


def _similarity(facts: DataFacts) -> Choice | None:
    numbers = [c for c in facts.first.columns.values() if c.is_number and SCORE_NAMES.fullmatch(str(c.name))]
    numbers += [c for c in facts.first.columns.values() if c.is_number and c.low < c.high and c not in numbers]
    numbers = [c for c in numbers if not c.names_rows]
    texts = _texts(facts)
    scores = [c for c in numbers if not c.is_label or c.distinct > MOST_CLASSES_IN_NUMBERS]
    if len(texts) != 2 or not scores:
        return None
    score = scores[0]
    low, high = (0.0, top) if (top := _round_up(score.high)) and score.low >= 0 else (score.low, score.high)
    return Choice(
        "similarity",
        f"two texts and a number from {score.low:g} to {score.high:g}",
        _entry(facts, *texts, score),
        tuple(texts),
        options={"range": [low, high]},
    )


def _round_up(value: float) -> float:
    return next((top for top in (1.0, 5.0, 10.0, 100.0) if value <= top), value)


def _classification(facts: DataFacts) -> Choice | None:
    labels = [c for c in facts.first.columns.values() if c.is_label]
    named = [c for c in labels if LABEL_NAMES.fullmatch(str(c.name))]
    texts = _texts(facts)
    texts = texts if len(texts) <= 2 else sorted(texts, key=lambda column: -column.length)[:1]
    if not labels or not texts:
        return None
    label = min(named or labels, key=lambda column: column.distinct)
    pair = " pairs" if len(texts) == 2 else ""
    why = f"column {label.name} has {label.distinct} values for {label.filled:,} text{pair or 's'}"
    return Choice("classification", why, _entry(facts, *texts, label), tuple(texts), label)


def _several_labels(facts: DataFacts) -> Choice | None:
    """A column whose values are lists of the same few labels, or such labels with a separator."""
    texts = sorted(_texts(facts), key=lambda column: -column.length)
    for column in facts.first.columns.values():
        listed = column.is_list and all(isinstance(one, str) for one in column.sample or [1])
        for between in (" ",) if listed else ("|", ";", ","):
            parts = {part.strip() for value in column.counts for part in value.split(between)}
            several = sum(count for value, count in column.counts.items() if between in value)
            few = 1 < len(parts) < min(MOST_PARTS, max(3, column.filled // 4)) and len(parts) < column.distinct
            if not few or several < 0.05 * column.filled or max(map(len, parts)) > 40 or texts[:1] in ([], [column]):
                continue
            entry = _entry(facts, texts[0], column) | ({} if listed or between == "|" else {"between": between})
            why = f"texts have several of {len(parts)} labels in column {column.name}"
            return Choice("classification", why, entry, tuple(texts[:1]), options={"several": True})
    return None


def _searches(facts: DataFacts) -> Choice | None:
    texts = _texts(facts)
    queries = [column for column in texts if QUERY_NAMES.fullmatch(str(column.name))]
    if len(texts) != 2 or len(queries) != 1:
        return None
    both = (queries[0], next(column for column in texts if column is not queries[0]))
    why = "queries and texts that belong to them"
    return Choice("contrastive", why, _entry(facts, *both), both, others=("reranking",))


def _questions(facts: DataFacts) -> Choice | None:
    columns = facts.first.columns
    if not {"context", "question", "answers"} <= columns.keys():
        return None
    texts = tuple(columns[name] for name in ("question", "context"))
    return Choice("question-answering", "questions with answers in a context", {}, texts)


def _pairs(facts: DataFacts) -> Choice | None:
    texts = _texts(facts)
    if len(texts) != 2 or any(column.is_list for column in facts.first.columns.values()):
        return None
    source, target = _ordered(texts)
    here, there = source.language, target.language
    if here != there:
        return Choice(
            "translation",
            f"texts in two languages, {here} and {there}",
            _entry(facts, source, target),
            (source, target),
        )
    if _looks_corrected(source, target):
        why = "texts and nearly the same texts"
        return Choice("correction", why, _entry(facts, source, target), (source, target))
    kind = "summarisation" if target.length * 3 < source.length and "summarisation" in Task.known() else "seq2seq"
    task = kind if kind in Task.known() else "translation"
    return Choice(task, "a text for every text, in one language", _entry(facts, source, target), (source, target))


def _looks_corrected(source: ColumnFacts, target: ColumnFacts) -> bool:
    """Whether most of a text is in what it becomes."""
    pairs = list(zip(source.examples, target.examples, strict=False))  # of the first rows, if none is repeated
    same = [SequenceMatcher(None, one.split(), other.split(), autojunk=False).ratio() for one, other in pairs]
    same = [
        max(one, SequenceMatcher(None, *pair, autojunk=False).ratio()) for one, pair in zip(same, pairs, strict=True)
    ]
    return len(same) > 1 and sorted(same)[len(same) // 2] > 1 - CHANGED and source.length > WORD


def _aligned(facts: DataFacts) -> Choice | None:
    """Two files of plain text with equally many lines in two languages."""
    files = facts.of("train")
    if len(files) != 2 or any(one.shape != PLAIN or one.paragraphs for one in files) or files[0].rows != files[1].rows:
        return None
    source, target = (one.columns[0] for one in files)
    if source.language == target.language:
        return None
    why = f"two files of {files[0].rows:,} lines, {source.language} and {target.language}"
    return Choice("translation", why, {}, (source, target), aligned=tuple(files))


def _language_model(facts: DataFacts) -> Choice | None:
    texts = _texts(facts)
    if not texts:
        return None
    column = max(texts, key=lambda one: one.length)
    if facts.first.shape == PLAIN:
        entry = {} if facts.first.paragraphs else {"document": "line"}
        return Choice("causal-lm", "free text", entry, (column,))
    if isinstance(column.name, int):
        return None
    entry = {} if column.name == "text" else {"key": column.name}
    return Choice("causal-lm", f"free text in column {column.name}", entry, (column,))


RULES: tuple[Rule, ...] = (
    _tagged_lines,
    _tagged_lists,
    _chats,
    _comparisons,
    _questions,
    _similarity,
    _several_labels,
    _classification,
    _aligned,
    _searches,
    _pairs,
    _language_model,
)
