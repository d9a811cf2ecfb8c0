"""What survives translation: URLs, code, tags, emoji and other spans, with and without protection.

    python bench/translation/spans.py [--model FOLDER] [--limit N]     survival by kind of span, before and after
    python bench/translation/spans.py --stand-ins                      how often a model copies each possible stand-in

A span survives if the translation contains it exactly as often as the source; a number with a unit, if value and unit
are there. `before` is `--no-protect`. The sentences are our own; all directions of the shipped model.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from allyouneed.apps.translate.numbers import numbers
from allyouneed.apps.translate.spans import carry
from allyouneed.apps.translate.translator import Translator
from allyouneed.folder import Folder
from allyouneed.models import shipped

NOUNS = {
    "en": """Please open {} and log in.
You can find it at {}.
I read about it on {} yesterday.
Send your answer to {} before Monday.
{} is not working today.
Have you seen {} before?
We use {} every day at work.
The file is stored in {} on the server.
Run {} to install the program.
If you need help, write to {} or call us.
She told me that {} was broken.
Don't forget to read {} first.
My friend likes {} very much.
Why did you delete {}?
I don't know what {} means.
He clicked on {} by mistake.
The teacher explained {} to the students.
When will {} be ready?
There is a mistake in {}.
Everything you need is in {}.
Let's talk about {} tomorrow.
I have never heard of {}.
Could you check {} for me?
Without {} the program does not start.""",
    "de": """Bitte öffne {} und melde dich an.
Du findest es unter {}.
Ich habe gestern auf {} davon gelesen.
Schicken Sie Ihre Antwort vor Montag an {}.
{} funktioniert heute nicht.
Hast du {} schon einmal gesehen?
Wir benutzen {} jeden Tag bei der Arbeit.
Die Datei liegt in {} auf dem Server.
Führe {} aus, um das Programm zu installieren.
Wenn du Hilfe brauchst, schreib an {} oder ruf uns an.
Sie sagte mir, dass {} kaputt sei.
Vergiss nicht, zuerst {} zu lesen.
Mein Freund mag {} sehr.
Warum hast du {} gelöscht?
Ich weiß nicht, was {} bedeutet.
Er hat aus Versehen auf {} geklickt.
Der Lehrer hat den Schülern {} erklärt.
Wann wird {} fertig sein?
In {} ist ein Fehler.
Alles, was du brauchst, ist in {}.
Lass uns morgen über {} sprechen.
Ich habe noch nie von {} gehört.
Könntest du {} für mich prüfen?
Ohne {} startet das Programm nicht.""",
    "fr": """Ouvrez {} et connectez-vous, s'il vous plaît.
Vous le trouverez sur {}.
J'en ai lu quelque chose sur {} hier.
Envoyez votre réponse à {} avant lundi.
{} ne marche pas aujourd'hui.
As-tu déjà vu {} ?
Nous utilisons {} tous les jours au travail.
Le fichier se trouve dans {} sur le serveur.
Lance {} pour installer le programme.
Si tu as besoin d'aide, écris à {} ou appelle-nous.
Elle m'a dit que {} était cassé.
N'oublie pas de lire {} d'abord.
Mon ami aime beaucoup {}.
Pourquoi as-tu effacé {} ?
Je ne sais pas ce que {} veut dire.
Il a cliqué sur {} par erreur.
Le professeur a expliqué {} aux élèves.
Quand est-ce que {} sera prêt ?
Il y a une erreur dans {}.
Tout ce dont tu as besoin est dans {}.
Parlons de {} demain.
Je n'ai jamais entendu parler de {}.
Pourrais-tu vérifier {} pour moi ?
Sans {}, le programme ne démarre pas.""",
    "zh": """请打开 {} 并登录。
你可以在 {} 找到它。
我昨天在 {} 上看到了。
请在星期一之前把答案寄到 {}。
{} 今天不能用。
你以前见过 {} 吗？
我们每天上班都用 {}。
文件在服务器的 {} 里。
运行 {} 来安装这个程序。
如果你需要帮助，请写信给 {}。
她告诉我 {} 坏了。
别忘了先看 {}。
我的朋友很喜欢 {}。
你为什么删除了 {}？
我不知道 {} 是什么意思。
他不小心点了 {}。
老师给学生解释了 {}。
{} 什么时候能准备好？
{} 里有一个错误。
你需要的一切都在 {} 里。
我们明天谈谈 {} 吧。
我从来没听说过 {}。
你能帮我检查一下 {} 吗？
没有 {}，程序就不能启动。""",
}
COUNTS = {
    "en": """You have {} new messages.
There are {} people in the room.
We found {} mistakes in the text.
Only {} days left.""",
    "de": """Du hast {} neue Nachrichten.
Es sind {} Leute im Zimmer.
Wir haben {} Fehler gefunden.
Nur noch {} Tage.""",
    "fr": """Vous avez {} nouveaux messages.
Il y a {} personnes dans la pièce.
Nous avons trouvé {} erreurs.
Il reste seulement {} jours.""",
    "zh": """你有 {} 条新消息。
房间里有 {} 个人。
我们找到了 {} 个错误。
只剩 {} 天了。""",
}
AMOUNTS = {
    "en": """The box weighs {}.
The whole thing costs {}.
It is {} from here to the station.
Add {} of water.
I need {}.""",
    "de": """Die Kiste wiegt {}.
Das Ganze kostet {}.
Es sind {} bis zum Bahnhof.
Gib {} Wasser dazu.
Ich brauche {}.""",
    "fr": """La boîte pèse {}.
Le tout coûte {}.
La gare est à {} d'ici.
Ajoutez {} d'eau.
J'ai besoin de {}.""",
    "zh": """这个箱子重 {}。
一共 {}。
从这里到车站有 {}。
加 {} 水。
我需要 {}。""",
}
MARKED = {  # brackets: what a pair of marks encloses
    "en": """The [red] car is very fast.
I have [never] seen such a thing.
She lives in [a small house] near the river.
[Please] close the door.
My brother is [two years] older than me.
We will meet [tomorrow morning] at the station.""",
    "de": """Das [rote] Auto ist sehr schnell.
Ich habe so etwas [noch nie] gesehen.
Sie wohnt in [einem kleinen Haus] am Fluss.
[Bitte] mach die Tür zu.
Mein Bruder ist [zwei Jahre] älter als ich.
Wir treffen uns [morgen früh].""",
    "fr": """La voiture [rouge] est très rapide.
Je n'ai [jamais] vu une chose pareille.
Elle habite [une petite maison] près de la rivière.
[Ferme] la porte.
Mon frère a [deux ans] de plus que moi.
On se voit [demain matin].""",
    "zh": """那辆[红色]的车很快。
我[从来没]见过这样的东西。
她住在河边的[一个小房子]里。
[请]关门。
我哥哥比我大[两岁]。
我们[明天早上]在车站见。""",
}
KINDS: dict[str, tuple[dict[str, str], list[str]]] = {
    "URL": (NOUNS, ["https://example.com/a?b=1&c=2", "www.example.org", "http://docs.example.net/en/index.html#top"]),
    "e-mail address": (NOUNS, ["anna@example.com", "first.last+tag@mail.example.org"]),
    "file path": (NOUNS, ["/usr/local/bin/python3", "C:\\Users\\anna\\notes.txt", "src/main.cpp", "config.yaml"]),
    "inline code": (NOUNS, ["`pip install torch`", "`x = y + 1`", "get_user_name", "print()"]),
    "placeholder": (NOUNS, ["{name}", "%s", "${user.name}", '<x id="7"/>', "{{ title }}", "%(path)s"]),
    "count (%d)": (COUNTS, ["%d", "%1$d"]),
    "@mention": (NOUNS, ["@anna", "@anna_berg"]),
    "#tag": (NOUNS, ["#python", "#1234"]),
    "number with unit": (AMOUNTS, ["5 kg", "$1,000.50", "20 %", "350 km", "12 €", "2.5 l"]),
    "tag pair": (MARKED, ["<b>|</b>", '<a href="https://example.com/x">|</a>', '<span class="k">|</span>']),
    "Markdown": (MARKED, ["**|**", "[|](https://example.com/x)", "*|*"]),
    "emoji, inside": (MARKED, ["| 😀", "| ❤️"]),
    "emoji, at the edges": (MARKED, ["👍 ^", "$ 😀🎉"]),
    "list mark, indentation": (MARKED, ["- ^", "  * ^", "1. ^", "    a) ^", "- [ ] ^", "> ^"]),
}
CANDIDATES = (
    "Tom/汤姆 Mary/玛丽/Marie/Maria John/约翰 Boston/波士顿 Paris/巴黎 Tokyo/东京/Tokio Facebook Tatoeba Windows "
    "X A CD NASA XYZ DNA Python 7 13 47 300 2019"
)


def sentences(kind: str, language: str) -> Iterator[tuple[str, list[str]]]:
    """Sentences with a span, and what must survive of each."""
    templates, samples = KINDS[kind]
    for number, template in enumerate(templates[language].splitlines()):
        for sample in samples if templates is not NOUNS else [samples[number % len(samples)]]:
            if "[" not in template or templates is not MARKED:
                yield template.replace("{}", sample), [sample]
                continue
            plain = re.sub(r"[\[\]]", "", template)
            if "^" in sample:
                yield sample.replace("^", plain), [sample.replace("^", "")]
            elif "$" in sample:
                yield sample.replace("$", plain), [sample.replace("$", "")]
            else:
                opening, closing = sample.split("|")
                yield (
                    template.replace("[", "\0").replace("]", closing).replace("\0", opening),
                    [opening, closing.strip()],
                )


def survives(kind: str, source: str, target: str, wanted: list[str]) -> bool:
    if kind == "number with unit":
        return numbers.has_quantity(wanted[0], target)
    if kind == "list mark, indentation":
        return target.startswith(wanted[0])
    return all(target.count(part) == source.count(part) for part in wanted if part)


def survival(translator: Translator, limit: int | None, protect: bool) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        kept: Counter[bool] = Counter()
        for here, there in translator.folder.directions:
            cases = list(sentences(kind, str(here)))[:limit]
            texts = translator.translate([source for source, _ in cases], there, from_=here, protect=protect)
            kept.update(survives(kind, case[0], text, case[1]) for case, text in zip(cases, texts, strict=True))
        found[kind] = 100 * kept[True] / kept.total()
        found[f"{kind}, sentences"] = kept.total()
    return found


def stand_ins(translator: Translator, limit: int | None) -> None:
    """How often each candidate comes back exactly once, in any of its forms."""
    directions = translator.folder.directions
    print("| stand-in | " + " | ".join(f"{here}→{there}" for here, there in directions) + " |")
    print("|---|" + "---:|" * len(directions))
    for candidate in CANDIDATES.split():
        forms = tuple(candidate.split("/"))
        row = []
        for here, there in directions:
            texts = [line.replace("{}", forms[0]) for line in NOUNS[str(here)].splitlines()][:limit]
            found = translator.translate(texts, there, from_=here)
            row.append(100 * sum(len(carry._pattern(forms).findall(text)) == 1 for text in found) / len(texts))
        print(f"| {forms[0]} | " + " | ".join(f"{share:.0f}" for share in row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--limit", type=int, help="sentences per kind and direction")
    parser.add_argument("--stand-ins", action="store_true")
    given = parser.parse_args()
    translator = Translator(Folder.load(given.model or shipped()))
    if given.stand_ins:
        stand_ins(translator, given.limit)
        return
    before, after = (survival(translator, given.limit, protect) for protect in (False, True))
    print("| span | sentences | before | after |\n|---|---:|---:|---:|")
    for kind in KINDS:
        print(f"| {kind} | {after[f'{kind}, sentences']:.0f} | {before[kind]:.1f} % | {after[kind]:.1f} % |")


if __name__ == "__main__":
    main()
