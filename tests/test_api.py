"""What `import allyouneed as ayn` promises."""

import re
import subprocess
import sys
import typing

import pytest
import torch

import allyouneed as ayn
from allyouneed.infer.predictors.registry import TASKS
from allyouneed.nn.batch import Batch, Rows
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


# --- typed predictors -----------------------------------------------------------------------------------------------


def test_load_has_an_overload_for_every_task():
    """tests/typing/typed_api.py holds what mypy must infer; here: no task is missing from the overloads."""
    found = {}
    for one in typing.get_overloads(ayn.load):
        for task in re.findall(r"'([\w-]+)'|\"([\w-]+)\"", one.__annotations__["task"]):
            found["".join(task)] = one.__annotations__["return"]
    for task, entry in TASKS.items():
        shown = getattr(ayn, found[task])
        assert issubclass(entry.predictor_class, shown) and getattr(ayn, entry.predictor) is entry.predictor_class
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        ayn.Nothing  # noqa: B018


@pytest.mark.slow
def test_mypy_reveals_the_types(tmp_path):
    lines = ["import allyouneed as ayn", "reveal_type(ayn.load())", "reveal_type(ayn.load('x', task='tagging').tag)"]
    (tmp_path / "user.py").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, "-m", "mypy", "user.py"], cwd=tmp_path, capture_output=True, text=True)
    assert 'Revealed type is "allyouneed.apps.translate.translator.Translator"' in done.stdout, done.stdout
    assert "def (sentences:" in done.stdout


def test_a_predictor_says_what_it_is_and_moves(folder, tmp_path):
    model = ayn.load(folder)
    count = sum(parameter.numel() for parameter in model.model.parameters())
    assert repr(model) == f"Translator(encoder-decoder, translation, {count:,} parameters, float32, cpu, {folder})"
    before = model.translate("x")
    assert model.to("bfloat16") is model and model.dtype == "bfloat16" and "bfloat16" in repr(model)
    assert model.to(torch.float32, "cpu").dtype == "float32" and isinstance(model.translate("x"), str)
    with pytest.raises(ayn.UserError, match="unknown device 'gpu'"):
        model.to("gpu")
    small = ayn.load()
    assert small.dtype == "int8" and "41,821,184 parameters" in repr(small)
    with pytest.raises(ayn.UserError, match="quantized"):
        small.to("float16")
    again = ayn.load(ayn.load(folder).save(tmp_path / "copy"))
    assert again.translate("x") == before and again.folder.path == tmp_path / "copy"


# --- a module of one's own loop ---------------------------------------------------------------------------------------

SMALL = ["width=16", "decoder[0].repeat=1", "decoder[0].mixer.heads=2", "decoder[0].channel.hidden=16"]


def test_a_module_takes_tensors_and_gives_logits():
    torch.manual_seed(0)
    translator = ayn.build("transformer-tiny", vocab=40).eval()
    source, target = torch.randint(3, 40, (2, 5)), torch.randint(3, 40, (2, 4))
    logits = translator(source, target, lengths=[5, 3], target_lengths=[4, 2])
    alone = translator(source[1:, :3], target[1:, :2])
    assert logits.shape == (2, 4, 40) and torch.allclose(logits[1:, :2], alone, atol=1e-5)
    generator = ayn.build("gpt2", SMALL, vocab=40).eval()
    assert torch.equal(generator(source), generator.logits(Batch(Rows(source))))
    image = ayn.build("vit-base-16", ["width=16", "encoder[0].mixer.heads=2", "encoder[0].repeat=1"])
    assert image(torch.rand(2, 3, 224, 224)).shape[0] == 2


@pytest.mark.parametrize(
    ("preset", "given", "said"),
    [
        ("transformer-tiny", [torch.zeros(1, 3).long()], "takes two inputs: module(source, target)"),
        ("transformer-tiny", [torch.zeros(2, 3).long(), torch.zeros(1, 3).long()], "1 rows for 2 sources"),
        ("gpt2", [torch.zeros(1, 3).long()] * 2, "takes one input: module(tokens)"),
        ("gpt2", [torch.zeros(1, 3)], "expected an integer tensor of token ids (batch, time)"),
        ("gpt2", [torch.zeros(3).long()], "expected an integer tensor of token ids (batch, time)"),
    ],
)
def test_wrong_tensors_are_user_errors(preset, given, said):
    module = ayn.build(preset, SMALL if preset == "gpt2" else None, vocab=40)
    with pytest.raises(ayn.UserError, match=re.escape(said)):
        module(*given)
    with pytest.raises(ayn.UserError, match="lengths of tokens: expected 1 numbers from 1 to 3"):
        ayn.build("gpt2", SMALL, vocab=40)(torch.zeros(1, 3).long(), lengths=[4])


def test_what_an_own_loop_has_trained_is_saved_and_loaded(tmp_path):
    tokenizer = ayn.train_tokenizer(["the cat sat on the mat"] * 5, vocab=270)
    module = ayn.build("gpt2", SMALL, vocab=tokenizer.size)
    tokens = torch.tensor([[tokenizer.bos, *tokenizer.encode("the cat sat on the mat"), tokenizer.eos]])
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.03)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(module(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for _ in range(2):  # the second replaces the first
        assert ayn.save(module, tokenizer, tmp_path / "mine") == tmp_path / "mine"
    model = ayn.load(tmp_path / "mine")
    assert isinstance(model, ayn.Generator) and model.generate("the cat", method="greedy").strip() == "sat on the mat"


def test_save_refuses_what_would_not_load(tmp_path):
    tokenizer = ayn.train_tokenizer(["a b c"], vocab=262)
    module = ayn.build("gpt2", SMALL, vocab=tokenizer.size)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with pytest.raises(ayn.UserError, match="photos: exists and is not a model folder"):
        ayn.save(module, tokenizer, tmp_path / "photos")
    with pytest.raises(ayn.UserError, match=r"unknown task 'causal_lm' \(did you mean 'causal-lm'\?\)"):
        ayn.save(module, tokenizer, tmp_path / "m", task="causal_lm")
    with pytest.raises(ayn.UserError, match=r"expected a module of allyouneed\.build"):
        ayn.save(torch.nn.Linear(2, 2), tokenizer, tmp_path / "m")
    with pytest.raises(ayn.UserError, match="the tokenizer: the source tokenizer has"):
        ayn.save(ayn.build("gpt2", SMALL, vocab=5), tokenizer, tmp_path / "m")
    classes = ayn.build(
        "bert-base", ["width=16", "encoder[0].mixer.heads=2", "head={kind: classes, labels: 2}"], vocab=300
    )
    with pytest.raises(ayn.UserError, match="labels: 0 names for 2 classes"):
        ayn.save(classes, tokenizer, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    ayn.save(classes, tokenizer, tmp_path / "m", labels=["good", "bad"])
    assert ayn.load(tmp_path / "m").labels == ["good", "bad"]


def test_train_and_evaluate_are_functions_and_packages():
    from allyouneed.metrics.translation import evaluate  # noqa: F401  # importing replaces the attribute
    from allyouneed.training import load_recipe  # noqa: F401

    with pytest.raises(ayn.UserError, match=r"nowhere\.yaml: cannot read"):
        ayn.train("nowhere.yaml")
    with pytest.raises(ayn.UserError, match="nowhere: no such model folder"):
        ayn.evaluate("nowhere", "nowhere.tsv")
    with pytest.raises(ayn.UserError, match="data: is required"):
        ayn.train({"model": "gpt2", "output": "x"})
