"""Amounts: a number with a word or an abbreviation for thousands to trillions: €16bn, 3,5 Mio. Euro, 16 Md€, 3亿."""

from __future__ import annotations

import re
from decimal import Decimal

# the words of each language, from the largest: factor, after one, after several
MAGNITUDES = {
    "en": [(10**12, "trillion", "trillion"), (10**9, "billion", "billion"), (10**6, "million", "million")],
    "de": [(10**12, "Billion", "Billionen"), (10**9, "Milliarde", "Milliarden"), (10**6, "Million", "Millionen")],
    "fr": [(10**12, "billion", "billions"), (10**9, "milliard", "milliards"), (10**6, "million", "millions")],
    "zh": [(10**12, "万亿", "万亿"), (10**8, "亿", "亿"), (10**4, "万", "万")],
}
MONEY = r"(?:(?:US|CA|AU|NZ|HK|R)?\$|[€£¥₹]|(?:USD|EUR|GBP|CNY|CHF|RMB|JPY)\b)"
# abbreviations: those that mean nothing else, and those that need a currency beside them
ALONE = {
    "tsd": 10**3, "mio": 10**6, "mn": 10**6, "mln": 10**6, "bn": 10**9, "mrd": 10**9, "md": 10**9, "mds": 10**9,
    "tn": 10**12, "trn": 10**12,
}  # fmt: skip
WITH_MONEY = {"k": 10**3, "m": 10**6, "b": 10**9}
NUMBER = r"\d+(?:[.,'’\u00a0\u202f]\d+)*"
SPACE = "[ \u00a0\u202f]?"
GAP = "[ \u00a0\u202f-]?"  # a $90-million project
WORDS = "|".join(sorted({one for n in ("en", "de", "fr") for _, *both in MAGNITUDES[n] for one in both}, key=len)[::-1])
SHORT = "[BbTt]n|BN|trn|[Mm]l?n|[Mm]io|[Mm]rd|Tsd|Mds?"
POINT = r"(?:\.(?= ?[^\s.]))?"  # of an abbreviation, where it does not end the sentence
AMOUNT = (
    rf"(?<![A-Za-z0-9_.,])(?:{MONEY}{SPACE}{NUMBER}{GAP}(?:(?:{SHORT}){POINT}|{WORDS}|[KkMmBb])"
    rf"|{NUMBER}{SPACE}(?:{MONEY}{SPACE}(?:(?:{SHORT}){POINT}|{WORDS})|(?:(?:{SHORT}){POINT}|{WORDS}|[KkM]){SPACE}{MONEY})"
    rf"|{NUMBER}{GAP}(?:(?:{SHORT}){POINT}|{WORDS}))(?![A-Za-zÀ-ɏ0-9_])"
    rf"|(?<![A-Za-z0-9_.,])(?:{MONEY}{SPACE})?{NUMBER}[十百千]?(?:万亿|[万萬亿億])"
    r"|[一二两兩三四五六七八九十][一二三四五六七八九十百千]{0,6}(?:万亿|[万萬亿億])[零一二三四五六七八九十百千万萬]{0,8}"
)
PARTS = re.compile(
    rf"(?P<money>{MONEY})?{SPACE}(?P<digits>{NUMBER})(?P<gap>{GAP})(?P<between>{MONEY})?{SPACE}(?P<word>[A-Za-z]+)"
    rf"(?P<point>\.?){SPACE}(?P<after>{MONEY})?"
)
# French nouns that are counted in millions
LINKED = re.compile(r" (?:dollars?|livres?|yuans?|yens?|francs?|personnes|gens|fois|tonnes)\b|[ \u00a0\u202f][$£¥]")
CHINESE_MONEY = {"$": "美元", "us$": "美元", "usd": "美元", "€": "欧元", "eur": "欧元", "£": "英镑", "gbp": "英镑",
                 "¥": "元", "cny": "元", "rmb": "元", "chf": "瑞士法郎", "jpy": "日元"}  # fmt: skip


def expanded(text: str, language: str) -> str:
    """An amount that is abbreviated, or written unusually, in the words of its language, which a model reads better;
    another text as it is."""
    found = PARTS.fullmatch(text)
    if found is None or language not in MAGNITUDES:
        return text
    short, digits = found["word"].lower(), found["digits"]
    money = found["money"] or found["between"] or found["after"]
    words = {size: several for size, _, several in MAGNITUDES[language]}
    factor = ALONE.get(short) or WITH_MONEY.get(short)
    if factor is None:  # a word
        usual = found["gap"] != "-" and not found["between"]
        return text if usual else with_money(f"{digits} {found['word']}", money, language)
    if language != "zh" and factor in words:
        return with_money(f"{digits} {words[factor]}", money, language)
    plain = digits.replace(".", "").replace(",", ".") if language in ("de", "fr") else digits.replace(",", "")
    try:
        return with_money(spelled(Decimal(plain) * factor, language), money, language)
    except ArithmeticError:
        return text


def with_money(amount: str, money: str | None, language: str) -> str:
    """An amount with its currency, as a language writes it: €16 billion, 16 Milliarden €, 160亿欧元."""
    if money is None:
        return amount
    if language == "zh":
        return amount + CHINESE_MONEY.get(money.lower(), money)
    if language == "en":
        return f"{money}{'' if not money.isalpha() else ' '}{amount}"
    return (
        f"{amount} {money}"
        if language == "de" or amount[-1].isdigit()
        else f"{amount} de {money}".replace("de €", "d’€")
    )


def spelled(value: Decimal, language: str) -> str:
    """A value with the largest word that leaves at most three decimals; in digits, where none does."""
    comma, group = (",", "." if language == "de" else "\u202f") if language in ("de", "fr") else (".", ",")
    for factor, one, several in MAGNITUDES[language]:
        rest = value / factor
        if rest >= 1 and rest == round(rest, 3):
            digits = f"{rest.normalize():f}".replace(".", comma)
            single = rest == 1 if language == "de" else rest < 2
            return f"{digits}{'' if language == 'zh' else ' '}{one if single else several}"
    whole, _, decimals = f"{value.normalize():,f}".partition(".")
    return whole.replace(",", group) + (comma + decimals if decimals else "")


def linked(amount: str, after: str, language: str) -> str:
    """An amount before what follows it: in French, a noun is linked to a word such as `millions`."""
    if language != "fr" or amount[-1].isdigit() or not LINKED.match(after):
        return amount
    return f"{amount} de"
