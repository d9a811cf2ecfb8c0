"""Which of several translators translates a text."""

from pathlib import Path

import pytest

from allyouneed.apps.translate.offers import Offer, choose
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.load import load
from allyouneed.models import shipped
from served import write_folder


def offer(*directions: tuple[str | None, str], languages: tuple[str, ...] = ()) -> Offer:
    return Offer.of(directions, languages, None)


ENPT, PTEN, DEEN, UNKNOWN = offer(("en", "pt")), offer(("pt", "en")), offer(("de", "en")), offer()


@pytest.mark.parametrize(
    ("offers", "source", "target", "number"),
    [
        ([ENPT, PTEN], "pt", "en", 1),
        ([ENPT, PTEN], "Portuguese", "English", 1),
        ([ENPT, PTEN], "pt-BR", "en-US", 1),
        ([ENPT, PTEN], None, "en", 1),
        ([ENPT, PTEN], "en", None, 0),
        ([UNKNOWN, PTEN], "pt", "en", 1),
        ([PTEN, UNKNOWN], "fi", "en", 1),
        ([ENPT, offer(languages=("en", "pt", "de"))], "de", "en", 1),
    ],
)
def test_a_direction_chooses_the_translator(offers: list[Offer], source: str | None, target: str, number: int) -> None:
    assert choose(offers, source, target, "") == number


def test_the_text_chooses_where_the_source_is_not_given() -> None:
    fren = offer(("fr", "en"))
    assert choose([fren, DEEN], None, "en", "Wo ist der Bahnhof? Ich suche ihn seit einer Stunde.") == 1
    assert choose([DEEN, fren], None, "en", "Où est la gare ? Je la cherche depuis une heure.") == 1
    with pytest.raises(UserError, match=r"several models translate into en; set the source language \(de, pt\)"):
        choose([PTEN, DEEN], None, "en", "Onde fica a estação?")  # the bundled detector does not know Portuguese


def test_a_direction_that_no_model_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"no model here translates en → de \(they translate en → pt; pt → en\)"):
        choose([ENPT, PTEN], "en", "de", "")


def test_an_offer_is_the_same_before_and_after_loading(tmp_path: Path) -> None:
    for path in (shipped(), write_folder(tmp_path / "plain", "translator")):
        read, loaded = Offer.read(path), Offer.of_folder(load(path))
        assert (read.sources, read.targets) == (loaded.sources, loaded.targets)
    assert "zh-Hant" in Offer.read(shipped()).targets


def test_a_model_of_one_direction_knows_it(tmp_path: Path) -> None:
    folder = load(write_folder(tmp_path / "plain", "translator"))
    folder.directions = [("en", "pt")]
    folder.save(tmp_path / "named")
    model = predictor(Folder.load(tmp_path / "named"))
    plain = model.translate("Paris", max_length=5)  # type: ignore[attr-defined]
    assert model.translate("Paris", to="Portuguese", from_="EN", max_length=5) == plain  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="unknown target language 'de'"):
        model.translate("Paris", to="de")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="unknown source language 'fr'"):
        model.translate("Paris", from_="fr")  # type: ignore[attr-defined]
