"""Special tokens around the texts of an imported tokenizer, from its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.interop.tokenizers import languages

LANGUAGE = re.compile(r"__(.+)__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")
SAMPLES = ("a", "1", ".", "一", "the")


def read_template(inner: Any) -> Template:
    """The special tokens that the tokenizer itself puts around one text and between two."""
    for sample in SAMPLES:
        one, two = inner.encode(sample), inner.encode(sample, sample)
        if 0 in one.sequence_ids and 1 in two.sequence_ids:
            break
    else:
        raise UserError("the tokenizer produces no tokens for a letter, a digit or a full stop")
    inside = [n for n, side in enumerate(one.sequence_ids) if side is not None]
    before, after = one.ids[: inside[0]], one.ids[inside[-1] + 1 :]
    first = [n for n, side in enumerate(two.sequence_ids) if side == 0]
    second = [n for n, side in enumerate(two.sequence_ids) if side == 1]
    between = two.ids[first[-1] + 1 : second[0]]
    types = two.type_ids[first[0]], two.type_ids[second[0]]
    last = two.type_ids[-1]
    closing = last if two.ids[second[-1] + 1 :] and last not in types else None
    return Template(tuple(before), tuple(between), tuple(after), tuple(before), types, closing)


def build_template(names: Mapping[str, str], template: tuple[str, str], ids: Mapping[str, int]) -> Any:
    """A post-processor: `template` is one text and two texts, with roles for special tokens ("cls A sep:0", …)."""
    from tokenizers import processors

    def substitute(text: str) -> list[str]:
        words = []
        for word in text.split():
            role, _, kind = word.partition(":")
            words.append(f"{'$' + role if role in 'AB' else names[role]}:{kind or 0}")
        return words

    used = {word.partition(":")[0] for text in template for word in text.split()} - {"A", "B"}
    missing = [role for role in sorted(used) if role not in names or names[role] not in ids]
    if missing:
        raise UserError(f"the tokenizer has no token for {', '.join(missing)}; add it to special_tokens_map.json")
    return processors.TemplateProcessing(
        single=substitute(template[0]),
        pair=substitute(template[1]),
        special_tokens=[(names[role], ids[names[role]]) for role in used],
    )


def language_tokens(specials: Mapping[int, str]) -> dict[str, int]:
    """The language tokens among the special tokens: `__de__`, `de_DE`, `deu_Latn` (also under "de")."""
    found = {number: LANGUAGE.fullmatch(name) for number, name in specials.items()}
    named = {match[1] or match[2]: number for number, match in found.items() if match}
    short = {code: named[name] for code, name in languages.SHORT.items() if name in named}
    return short | named


def without_language_tokens(template: Template, tokens: Iterable[int], side: str) -> Template:
    """The template without language tokens, since the language is chosen per text; `side`: before or after it."""
    removed = set(tokens)
    before, after, between = (
        tuple(number for number in ids if number not in removed)
        for ids in (template.before, template.after, template.between)
    )
    return replace(template, before=before, after=after, between=between, language=side)  # type: ignore[arg-type]


def token_ids(value: Any) -> list[int]:
    """One id, a list of ids, or none."""
    if value is None:
        return []
    found = value if isinstance(value, list) else [value]
    if any(type(number) is not int for number in found):
        raise UserError(f"config.json or generation_config.json: token ids must be integers, not {value!r}")
    return found


def with_generation_settings(template: Template, settings: Sequence[Mapping[str, Any]]) -> Template:
    """Forced, banned and end tokens of generated text, each from the first settings that define it."""

    def first(key: str) -> Any:
        return next((tree[key] for tree in settings if tree.get(key) is not None), None)

    ends = token_ids(first("eos_token_id"))
    words = first("bad_words_ids") or []
    never = [word[0] for word in words if len(word) == 1] + token_ids(first("suppress_tokens"))
    return replace(
        template,
        forced=tuple(token_ids(first("forced_bos_token_id"))),
        stops=tuple(ends[1:]),
        never=tuple(number for number in dict.fromkeys(never) if number >= 0 and number not in ends),
        ended=bool(token_ids(first("forced_eos_token_id"))),
    )
