"""Names of languages in any usual form."""

import pytest

from allyouneed.data.languages import find, resolve
from allyouneed.errors import UserError

SHIPPED = ["de", "en", "fr", "zh"]
NAMES = {
    "en": "EN en-US en_GB eng English english anglais Englisch 英语 英文 英語 en_US.UTF-8",
    "de": "DE de-AT de_DE deu ger German Deutsch deutsch allemand 德语 德文",
    "fr": "FR fr-CA fra fre French français Français francais FRANÇAIS Französisch 法语",
    "zh": "ZH zh-CN zh_Hans zh-Hans-CN cmn zho chi Chinese chinois 中文 汉语 普通话 简体中文 zh-TW",
}


@pytest.mark.parametrize("known", [SHIPPED, ["de_DE", "en_XX", "fr_XX", "zh_CN"]], ids=["short", "mbart"])
@pytest.mark.parametrize("code", NAMES)
def test_every_usual_form_is_the_code_of_the_model(code: str, known: list[str]) -> None:
    (wanted,) = (one for one in known if one.startswith(code))
    for name in [*NAMES[code].split(), f" {code} "]:
        if (name, wanted) != ("zh-TW", "zh_CN"):
            assert resolve(name, known) == wanted, name
    assert resolve(wanted, known) == wanted


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("zh-TW", ["zho_Hant"]),
        ("zh-HK", ["zho_Hant"]),
        ("Traditional Chinese", ["zho_Hant"]),
        ("Chinese (Simplified)", ["zho_Hans"]),
        ("zh-SG", ["zho_Hans"]),
        ("Chinese", ["zho_Hans", "zho_Hant"]),
        ("pt-BR", ["por_Latn"]),
        ("tlh", []),
        ("", []),
        ("- _", []),
    ],
)
def test_script_and_region_select_among_several(name: str, found: list[str]) -> None:
    assert find(name, ["eng_Latn", "por_Latn", "zho_Hans", "zho_Hant"]) == found


def test_a_models_own_code_wins_over_its_usual_meaning() -> None:
    assert resolve("cy", ["cy", "gr", "la"]) == "cy"  # Cyrillic letters in some toy model; ISO's Welsh
    assert resolve("GR", ["cy", "gr", "la"]) == "gr"
    assert find("zh-TW", ["zh_CN"]) == []  # another script


def test_unknown_and_ambiguous_names_list_what_the_model_knows() -> None:
    with pytest.raises(UserError, match=r"^unknown target language 'klingon' \(allowed: de, en, fr, zh\)$"):
        resolve("klingon", SHIPPED, "target language")
    with pytest.raises(UserError, match="'Chinese' is ambiguous: set one of zho_Hans, zho_Hant"):
        resolve("Chinese", ["zho_Hant", "zho_Hans"])
