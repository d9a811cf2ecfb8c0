"""Names, places, addresses and code for the slots of templates.tsv, in four languages; most are the same in all.

Cities, countries, languages and currencies follow CLDR (Babel).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

from babel import Locale
from babel.numbers import get_currency_name

from augmentation.amounts import LANGUAGES, LOCALES, Texts, same


def words(text: str) -> list[str]:
    return text.split()


SYLLABLES = words(
    "ba be bo bra da de dor el fa fel gar go han il jo ka kel kov la len lo mar mi mon na nel no or pa per ra ri "
    "ro sa sen shi ska ta tan to tri va vel vi wen ya yor za zen"
)
GIVEN = words(
    "Anna Ben Carlos Diana Erik Fatima Greta Hassan Ingrid Jack Karin Lars Linda Luca Magda Marco Nadia Nina Olga "
    "Pablo Petra Rita Sven Tanja Uwe Vera Viktor Wanda Yusuf Zoe Hannah Lukas Sofia Priya Kwame Amara Bjorn "
    "Dmitri Giulia Mateo Keiko Ravi Leila Omar Ewa Marek Joana"
)
FAMILY = words(
    "Kowalski Jensen Müller García Rossi Novak Schmidt Dubois Okafor Petrov Silva Larsen Weber Andersson Haddad "
    "Nakamura Patel Horvat Fischer Moreau Lindqvist Baker Thompson Schneider Lefebvre Mbeki Tanaka Ivanova "
    "Papadakis O'Brien McCarthy van_Dijk Zimmermann Bianchi Costa Keller Nowak Sørensen Yılmaz Kaya"
)
TLD = ("com", "org", "net", "de", "fr", "cn", "io", "eu", "co.uk", "info")
EXTENSIONS = words("txt md pdf docx xlsx csv json yaml xml html py js cpp h zip tar.gz png jpg mp3 mp4 log")
EMOJI = words("😀 😂 👍 ❤️ 🎉 😊 🙏 🔥 😢 🚀 ✅ ⚠️ 😍 🤔 👏 🌍 🐶 ☀️ 🎂 💡")
WORDS = words(
    "user name file count total path value item price page title date message order error size email link city "
    "version group host port key"
)


def invented(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def person(rng: random.Random) -> Texts:
    family = rng.choice(FAMILY).replace("_", " ") if rng.random() < 0.6 else invented(rng).capitalize()
    return same(rng.choice((family, f"{rng.choice(GIVEN)} {family}", rng.choice(GIVEN))))


def company(rng: random.Random) -> Texts:
    name = invented(rng).capitalize()
    return same(
        name + rng.choice(("", "", "", " Inc.", " GmbH", " Ltd", " AG", " SA", " Group", "soft", "tech")).rstrip(".")
    )


@cache
def cities() -> list[Texts]:
    """Cities whose names CLDR gives in Chinese, without an article in French."""
    countries = {one["en"] for one in territory_names("territories")}
    zones = {language: Locale.parse(LOCALES[language]).time_zones for language in LANGUAGES}
    found = []
    for zone, chinese in sorted(zones["zh"].items()):
        region, _, city = zone.rpartition("/")
        if not region.startswith(("Europe", "Asia", "Africa", "America", "Australia")) or not chinese.get("city"):
            continue
        name = city.replace("_", " ")
        texts = {one: str(zones[one].get(zone, {}).get("city") or name) for one in LANGUAGES}
        if (
            not any(char in "()/" for text in texts.values() for char in text)
            and texts["fr"][:3] not in ("Le ", "La ")
            and texts["en"] not in countries
        ):
            found.append(texts)
    return found


@cache
def territory_names(kind: str) -> list[Texts]:
    """Countries, languages or currencies in all four languages."""
    locales = {language: Locale.parse(LOCALES[language]) for language in LANGUAGES}
    if kind == "currency":
        keys = [
            "USD",
            "EUR",
            "GBP",
            "JPY",
            "CNY",
            "CHF",
            "RUB",
            "INR",
            "KRW",
            "BRL",
            "CAD",
            "AUD",
            "MXN",
            "SEK",
            "NOK",
            "DKK",
            "PLN",
            "CZK",
            "HUF",
            "TRY",
            "ZAR",
            "THB",
            "SGD",
        ]
        return [{one: get_currency_name(key, locale=LOCALES[one]) for one in LANGUAGES} for key in keys]
    tables = {one: getattr(locales[one], kind) for one in LANGUAGES}
    keys = [
        key
        for key in sorted(tables["en"])
        if len(key) == 2 and key.isalpha() and key not in ("EU", "EZ", "UN", "XA", "XB", "ZZ", "QO")
    ]
    return [
        {one: str(tables[one][key]) for one in LANGUAGES}
        for key in keys
        if all(key in tables[one] for one in LANGUAGES)
    ]


def of_list(values: Callable[[], list[Texts]]) -> Callable[[random.Random], Texts]:
    return lambda rng: rng.choice(values())


def url(rng: random.Random) -> str:
    host = f"{invented(rng)}{rng.choice(('', '-' + invented(rng)))}.{rng.choice(TLD)}"
    path = "".join(
        "/" + rng.choice((invented(rng), rng.choice(WORDS), str(rng.randrange(3000)))) for _ in range(rng.randrange(4))
    )
    query = rng.choice(
        (
            "",
            "",
            "",
            f"?{rng.choice(WORDS)}={rng.randrange(100)}",
            f"#{invented(rng)}",
            f"?q={invented(rng)}&page={rng.randrange(9)}",
        )
    )
    return (
        rng.choice(("https://", "https://", "http://", "www.", "https://www.")) + host + path + (query if path else "")
    )


def email(rng: random.Random) -> str:
    name = rng.choice(
        (
            invented(rng),
            f"{rng.choice(GIVEN).lower()}.{invented(rng)}",
            f"{rng.choice(WORDS)}{rng.randrange(99)}",
            f"info+{invented(rng)}",
        )
    )
    return f"{name}@{invented(rng)}.{rng.choice(TLD)}"


def file_name(rng: random.Random) -> str:
    stem = rng.choice(
        (
            invented(rng),
            f"{rng.choice(WORDS)}_{rng.randrange(2030)}",
            f"{invented(rng)}-{rng.choice(WORDS)}",
            rng.choice(WORDS),
        )
    )
    return f"{stem}.{rng.choice(EXTENSIONS)}"


def path(rng: random.Random) -> str:
    parts = [rng.choice(("usr", "home", "etc", "src", "data", "docs", invented(rng))) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.25:
        return "C:\\" + "\\".join(parts) + "\\" + file_name(rng)
    return rng.choice(("/", "/", "~/", "./", "")) + "/".join(parts) + "/" + file_name(rng)


def code(rng: random.Random) -> str:
    one, two = rng.choice(WORDS), rng.choice(WORDS)
    return rng.choice((
        f"`{one}`", f"`{one}_{two}`", f"`{invented(rng)} --{one}`", f"`{one} = {rng.randrange(100)}`",
        f"{one}_{two}", f"get_{one}()", f"`pip install {invented(rng)}`", f"`{invented(rng)}.{one}({two})`",
        f"--{one}-{two}", f"`git {rng.choice(('pull', 'commit', 'push'))}`",
    ))  # fmt: skip


def placeholder(rng: random.Random) -> str:
    one = rng.choice(WORDS)
    return rng.choice((
        "%s", "%d", f"{{{one}}}", f"{{{rng.randrange(5)}}}", f'<x id="{rng.randint(1, 20)}"/>', f"%({one})s",
        f"${{{one}}}", f"{{{{ {one} }}}}", f"%{rng.randint(1, 4)}$s", f"%{{{one}}}", f"${one.upper()}",
        f"%{rng.randint(1, 4)}", f"<ph{rng.randint(1, 9)}/>", f"[[{one}]]",
    ))  # fmt: skip


def handle(rng: random.Random) -> str:
    return rng.choice("@#") + rng.choice(
        (invented(rng), f"{rng.choice(GIVEN).lower()}_{rng.randrange(99)}", rng.choice(WORDS))
    )


NOUNS = (url, url, email, file_name, path, code, placeholder, placeholder, handle)
# what inference puts into a sentence instead (THINGS and PEOPLE of spans/carry.py), and what it may become
STAND_INS = {
    "Facebook": "Facebook",
    "Tom": "汤姆",
    "Boston": "波士顿",
    "Paris": "巴黎",
    "Tatoeba": "Tatoeba",
    "Tokyo": "东京",
}


def noun(rng: random.Random) -> Texts:
    return same(rng.choice(NOUNS)(rng))


def reference(rng: random.Random) -> Texts:
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(rng.randint(1, 3)))
    return same(
        rng.choice(
            (
                str(rng.randint(100, 999)),
                f"{letters}-{rng.randrange(10**5)}",
                f"{letters}{rng.randrange(10**4)}",
                f"0x{rng.randrange(2**16):04X}",
                f"#{rng.randrange(10**5)}",
                str(rng.randrange(10**7, 10**9)),
            )
        )
    )


def flight(rng: random.Random) -> Texts:
    airline = rng.choice(("LH", "AF", "BA", "CA", "UA", "MU"))
    return same(airline + rng.choice((" ", "")) + str(rng.randint(10, 9999)))
