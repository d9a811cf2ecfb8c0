"""Templates of special tokens, and special tokens spelled out in text, for our tokenizers and foreign ones."""

from pathlib import Path

import pytest

from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError

TEXTS = ["the cat sat on the mat </s> and more", "a dog ran to the cat"] * 4


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return train(TokenizerConfig(vocab=300, specials=("<mask>",)), TEXTS)


def test_our_template_is_bos_text_eos(own: Tokenizer) -> None:
    assert own.frame([7, 8]) == ([own.bos, 7, 8, own.eos], [0] * 4)
    assert own.frame([7], [8, 9]) == ([own.bos, 7, own.eos, 8, 9, own.eos], [0, 0, 0, 1, 1, 1])
    assert own.opening == (own.bos,) and (own.template.count(), own.template.count(2)) == (2, 3)


def test_templates_with_trailing_tokens_and_their_own_type() -> None:
    marks = Template((), (4,), (4, 3), types=(0, 1), closing=2)
    assert marks.frame([7, 8]) == ([7, 8, 4, 3], [0, 0, 0, 2])
    assert marks.frame([7], [8]) == ([7, 4, 8, 4, 3], [0, 0, 1, 1, 2])
    assert marks.frame([]) == ([4, 3], [0, 2])
    assert Template(before=(1,), between=(2, 2), after=(2,), types=(0, 0)).frame([7], [8])[1] == [0] * 6
    assert Template().frame([]) == ([], [])


def test_templates_are_saved_and_loaded() -> None:
    marks = Template((1,), (2, 2), (2,), (1,), (0, 0), None, "after", 9, (5,), (6, 7), (8,), True)
    assert Template.from_tree(marks.to_tree()) == marks
    with pytest.raises(UserError, match="a template is a mapping"):
        Template.from_tree({"before": [1], "behind": [2]})


def test_a_foreign_tokenizer_keeps_its_template_in_our_folder(own: Tokenizer, tmp_path: Path) -> None:
    inner = own._inner
    foreign = Tokenizer(inner, 0, 1, 2, {"de": 9}, template=Template((1, 1), (), (2,)), mask=3)
    Vocabularies(foreign, foreign).save(tmp_path)
    again = Vocabularies.load(tmp_path)
    assert again.joint and again.source.about == foreign.about and again.hash == foreign.hash != own.hash
    Vocabularies(own, own).save(tmp_path)
    assert not Vocabularies.load(tmp_path).source.foreign
    (tmp_path / "tokenizer.marks.json").write_text('{"pad": 0}')
    with pytest.raises(UserError, match=r"marks\.json: marks: is required"):
        Vocabularies.load(tmp_path)


def test_masks_are_spelled_by_us_and_other_names_are_text(own: Tokenizer) -> None:
    ids = own.encode_masked("the <mask> sat</s>")
    assert ids == [*own.encode("the "), own.mask, *own.encode(" sat</s>")]
    assert own.eos not in ids and own.decode_masked(ids) == "the <mask> sat</s>"
    assert own.eos in own.encode("the</s>", specials=True) and own.eos not in own.encode("the</s>")
