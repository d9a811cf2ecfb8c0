"""What `import allyouneed as ayn` promises."""

import pytest
import torch

import allyouneed as ayn
from small_model import small_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("api"))


def test_load_and_translate(folder):
    model = ayn.load(folder)
    texts = ["May 5, 2020", "", "  2020年1月1日 "]
    found = model.translate(texts)
    assert found == ayn.load(str(folder)).translate(texts), "a path may be a string"
    assert found[0] == model.translate(texts[0]) != ""
    assert found[1] == ""
    assert found[2] == f"  {model.translate(texts[2].strip())} "


def test_invalid_folders_and_texts_are_user_errors(folder, tmp_path):
    with pytest.raises(ayn.UserError, match="no such model folder"):
        ayn.load(tmp_path / "nowhere")
    with pytest.raises(ayn.UserError, match="must be a string, not int"):
        ayn.load(folder).translate(["one", 2])
    with pytest.raises(ayn.UserError, match=r"beem: unknown; did you mean 'beam'\?"):
        ayn.load(folder).translate("one", beem=2)


def test_build_gives_fresh_weights_of_the_paper(monkeypatch):
    with torch.device("meta"):
        module = ayn.build("transformer-base", vocab=1234)
    assert module.embed.tokens.weight.shape == (1234, 512)
    assert len(module.encoder.blocks) == len(module.decoder.blocks) == 6


def test_build_takes_changes_and_trees():
    changed = ayn.build("transformer-tiny", ["encoder[0].repeat=1", "width=32"], vocab=50)
    assert len(changed.encoder.blocks) == 1
    assert changed.embed.tokens.weight.shape == (50, 32)
    tree = ayn.config.tree_of(changed.config)
    assert ayn.model_config(tree) == changed.config
    again = ayn.build(tree)
    assert {name: value.shape for name, value in again.named_parameters()} == {
        name: value.shape for name, value in changed.named_parameters()
    }


def test_a_config_is_not_changed_by_building_from_it():
    tree = ayn.config.preset_tree("transformer-tiny")
    before = repr(tree)
    ayn.model_config(tree, ["width=32"], vocab=50)
    assert repr(tree) == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("transformer-bas",), "did you mean 'transformer-base'"),
        (("transformer-tiny", ["widht=3"]), "widht: unknown; did you mean 'width'"),
        (("transformer-tiny", ["width"]), "expected key=value"),
        (({"kind": "encodr-decoder"},), "did you mean 'encoder-decoder'"),
    ],
)
def test_invalid_configs_are_user_errors(args, said):
    with pytest.raises(ayn.UserError, match=said):
        ayn.build(*args)
