"""Names of languages: `EN`, `en-US`, `eng`, `English`, `anglais`, `英语` all mean the model's `en`.

`resolve` is the only place that interprets a name; the command line, Python and recipes use it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from allyouneed.errors import UserError, near

# a character of Chinese or Japanese, full-width punctuation included
EAST_ASIAN = re.compile("[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003134f]")
# ISO 639-1, other codes | English | its own | German | French | Chinese. Names are separated by commas.
TABLE = """
af afr | Afrikaans | Afrikaans | Afrikaans | afrikaans | 南非语, 阿非利堪斯语
ar ara arb | Arabic | العربية | Arabisch | arabe | 阿拉伯语, 阿拉伯文
be bel | Belarusian | беларуская | Belarussisch, Weißrussisch | biélorusse | 白俄罗斯语
bg bul | Bulgarian | български | Bulgarisch | bulgare | 保加利亚语
bn ben | Bengali, Bangla | বাংলা | Bengalisch | bengali | 孟加拉语
ca cat | Catalan | català | Katalanisch | catalan | 加泰罗尼亚语
cs ces cze | Czech | čeština, česky | Tschechisch | tchèque | 捷克语
cy cym wel | Welsh | Cymraeg | Walisisch | gallois | 威尔士语
da dan | Danish | dansk | Dänisch | danois | 丹麦语
de deu ger | German | Deutsch | Deutsch | allemand | 德语, 德文, 德國語
el ell gre | Greek | ελληνικά | Griechisch | grec | 希腊语
en eng | English | English | Englisch | anglais | 英语, 英文, 英語
eo epo | Esperanto | Esperanto | Esperanto | espéranto | 世界语
es spa | Spanish, Castilian | español, castellano | Spanisch | espagnol | 西班牙语, 西班牙文, 西语
et est | Estonian | eesti | Estnisch | estonien | 爱沙尼亚语
eu eus baq | Basque | euskara | Baskisch | basque | 巴斯克语
fa fas per pes | Persian, Farsi | فارسی | Persisch | persan | 波斯语
fi fin | Finnish | suomi | Finnisch | finnois | 芬兰语
fr fra fre | French | français | Französisch | français | 法语, 法文, 法語
ga gle | Irish | Gaeilge | Irisch | irlandais | 爱尔兰语
gl glg | Galician | galego | Galicisch | galicien | 加利西亚语
gu guj | Gujarati | ગુજરાતી | Gujarati | gujarati | 古吉拉特语
he heb iw | Hebrew | עברית | Hebräisch | hébreu | 希伯来语
hi hin | Hindi | हिन्दी, हिंदी | Hindi | hindi | 印地语
hr hrv | Croatian | hrvatski | Kroatisch | croate | 克罗地亚语
hu hun | Hungarian | magyar | Ungarisch | hongrois | 匈牙利语
hy hye arm | Armenian | հայերեն | Armenisch | arménien | 亚美尼亚语
id ind in | Indonesian | Bahasa Indonesia | Indonesisch | indonésien | 印尼语, 印度尼西亚语
is isl ice | Icelandic | íslenska | Isländisch | islandais | 冰岛语
it ita | Italian | italiano | Italienisch | italien | 意大利语, 意大利文
ja jpn jp | Japanese | 日本語, にほんご | Japanisch | japonais | 日语, 日文
ka kat geo | Georgian | ქართული | Georgisch | géorgien | 格鲁吉亚语
kk kaz | Kazakh | қазақша | Kasachisch | kazakh | 哈萨克语
km khm | Khmer | ខ្មែរ | Khmer | khmer | 高棉语
ko kor kr | Korean | 한국어, 조선말 | Koreanisch | coréen | 韩语, 韩文, 朝鲜语
la lat | Latin | latina | Latein, Lateinisch | latin | 拉丁语
lt lit | Lithuanian | lietuvių | Litauisch | lituanien | 立陶宛语
lv lav lvs | Latvian | latviešu | Lettisch | letton | 拉脱维亚语
mk mkd mac | Macedonian | македонски | Mazedonisch | macédonien | 马其顿语
mn mon khk | Mongolian | монгол | Mongolisch | mongol | 蒙古语
mr mar | Marathi | मराठी | Marathi | marathi | 马拉地语
ms msa may zsm | Malay | Bahasa Melayu | Malaiisch | malais | 马来语
my mya bur | Burmese | မြန်မာ | Birmanisch | birman | 缅甸语
ne nep npi | Nepali | नेपाली | Nepalesisch | népalais | 尼泊尔语
nl nld dut | Dutch, Flemish | Nederlands | Niederländisch, Holländisch | néerlandais | 荷兰语
no nor nb nob | Norwegian | norsk, bokmål | Norwegisch | norvégien | 挪威语
pl pol | Polish | polski | Polnisch | polonais | 波兰语
ps pus pbt | Pashto | پښتو | Paschtu | pachto | 普什图语
pt por | Portuguese | português | Portugiesisch | portugais | 葡萄牙语, 葡萄牙文, 葡语
ro ron rum mo | Romanian, Moldovan | română | Rumänisch | roumain | 罗马尼亚语
ru rus | Russian | русский | Russisch | russe | 俄语, 俄文
sk slk slo | Slovak | slovenčina | Slowakisch | slovaque | 斯洛伐克语
sl slv | Slovenian, Slovene | slovenščina | Slowenisch | slovène | 斯洛文尼亚语
sq sqi alb als | Albanian | shqip | Albanisch | albanais | 阿尔巴尼亚语
sr srp | Serbian | српски, srpski | Serbisch | serbe | 塞尔维亚语
sv swe | Swedish | svenska | Schwedisch | suédois | 瑞典语
sw swa swh | Swahili | Kiswahili | Suaheli | swahili | 斯瓦希里语
ta tam | Tamil | தமிழ் | Tamil, Tamilisch | tamoul | 泰米尔语
te tel | Telugu | తెలుగు | Telugu | télougou | 泰卢固语
th tha | Thai | ไทย, ภาษาไทย | Thailändisch | thaï | 泰语, 泰文
tl tgl fil | Tagalog, Filipino | Tagalog | Tagalog | tagalog | 他加禄语, 菲律宾语
tr tur | Turkish | Türkçe | Türkisch | turc | 土耳其语
uk ukr | Ukrainian | українська | Ukrainisch | ukrainien | 乌克兰语
ur urd | Urdu | اردو | Urdu | ourdou | 乌尔都语
uz uzb uzn | Uzbek | oʻzbek | Usbekisch | ouzbek | 乌兹别克语
vi vie | Vietnamese | tiếng Việt | Vietnamesisch | vietnamien | 越南语, 越语
zh zho chi cmn cn | Chinese, Mandarin | 中文, 汉语, 漢語, 普通话, 國語, 华语 | Chinesisch | chinois, mandarin | 中国话
"""
SCRIPT_NAMES = {"简体中文": "hans", "簡體中文": "hans", "繁体中文": "hant", "繁體中文": "hant", "正體中文": "hant"}
SCRIPTS = {"cn": "hans", "sg": "hans", "tw": "hant", "hk": "hant", "mo": "hant"}  # of Chinese, by region
WORDS = {"simplified": "hans", "traditional": "hant"}


class LanguageName(NamedTuple):
    """A name taken apart: the ISO 639-1 code where there is one, and the subtags (script, region), in lower case."""

    language: str
    subtags: tuple[str, ...]

    @property
    def script(self) -> str | None:
        if self.language == "zh":
            return next(
                (SCRIPTS.get(tag, tag) for tag in self.subtags if tag in SCRIPTS or tag.startswith("han")), None
            )
        return next((tag for tag in self.subtags if len(tag) == 4), None)


@cache
def _codes() -> dict[str, str]:
    """ISO 639-1 code of each code and name."""
    found: dict[str, str] = {}
    for line in TABLE.strip().splitlines():
        codes, *names = line.split("|")
        for name in [*codes.split(), *(name for column in names for name in column.split(","))]:
            found.setdefault(_plain(name), codes.split()[0])
    return found


def _plain(name: str) -> str:
    """The name without case, accents and surrounding spaces: `francais` for `Français`."""
    letters = unicodedata.normalize("NFKD", name.strip().casefold())
    return unicodedata.normalize("NFC", "".join(char for char in letters if not unicodedata.combining(char)))


@cache
def parse_name(name: str) -> LanguageName:
    """`zh-CN`, `zho_Hans`, `Chinese (Simplified)`: a language and its subtags; an unknown name is a language itself."""
    codes, plain = _codes(), _plain(name)
    if plain in codes:
        return LanguageName(codes[plain], ())
    if name.strip() in SCRIPT_NAMES:
        return LanguageName("zh", (SCRIPT_NAMES[name.strip()],))
    parts = [WORDS.get(part, part) for part in re.split(r"[\s_()\-.@]+", plain) if part]
    for number, part in enumerate(parts):  # the language is first, or after its qualifier: Simplified Chinese
        if part in codes and (number == 0 or parts[0] in WORDS.values()):
            return LanguageName(codes[part], tuple(parts[:number] + parts[number + 1 :]))
    return LanguageName(parts[0] if parts else plain, tuple(parts[1:]))


def iso_code(name: str) -> str | None:
    """The ISO 639-1 code of a language, by any of its names; None where it has none."""
    code = parse_name(name).language
    return code if code in _codes().values() else None


def find(name: str, known: Iterable[str]) -> list[str]:
    """The model's codes that a name can mean, best matches only: one if it is unambiguous."""
    codes = list(known)
    if name in codes:
        return [name]
    asked = parse_name(name)
    found = [(code, parse_name(code)) for code in codes]
    same = [(code, one) for code, one in found if one.language == asked.language]
    if asked.script is not None:  # a code without a script may have any
        same = [(code, one) for code, one in same if one.script in (asked.script, None)]
    shared = {code: len({*one.subtags, one.script} & {*asked.subtags, asked.script} - {None}) for code, one in same}
    best = max(shared.values(), default=0)
    closest = [code for code, count in shared.items() if count == best]
    plain = [code for code in closest if not parse_name(code).subtags]
    return plain if len(plain) == 1 and len(closest) > 1 and not best else closest


def resolve(name: str, known: Sequence[str], what: str = "language", allowed: Sequence[str] = ()) -> str:
    """The model's code for a language name in any usual form. For the error: `what` it is (`target language`, …), and
    what is `allowed`, if it is more than the codes."""
    found = find(name, known)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{what} {name!r} is ambiguous: set one of {', '.join(sorted(found))}")
    raise UserError(f"unknown {what} {name!r}{near(name, known)} (allowed: {', '.join(allowed or known)})")


def english_name(code: str) -> str:
    """The English name of a language, and its script if the code has one; the code itself if it is unknown."""
    asked = parse_name(code)
    script = {"hans": " (simplified)", "hant": " (traditional)"}.get(asked.script or "", "")
    for line in TABLE.strip().splitlines():
        codes, names, *_ = line.split("|")
        if asked.language == codes.split()[0]:
            return names.split(",")[0].strip() + script
    return code
