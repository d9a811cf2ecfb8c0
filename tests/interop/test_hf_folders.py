"""A Hugging Face folder works directly: its task, labels, lengths and vectors are those of the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import allyouneed as ayn
import tiny_folders as tinyfolders
from allyouneed.cli import main
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, train
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.interop.hf.folder import task_of
from allyouneed.interop.load import about, load
from allyouneed.training import load_recipe
from allyouneed.training import train as run

TEXTS = ["a wonderful film", "a terrible film", "quite wonderful", "quite terrible, and long"] * 6


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    return train(TokenizerConfig(vocab=280), TEXTS)


def small_bert(folder: Path, words: Tokenizer | None, kind: str = "BertModel", **more: Any) -> Any:
    """Their model, saved in a folder; `words` is its tokenizer, without special tokens around a text."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    config = transformers.BertConfig(vocab_size=300, max_position_embeddings=40, **sizes, **more)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    if words is not None:
        words.save(folder / "tokenizer.json")
        named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return model


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("bert", "BertModel", "similarity"),
        ("bert", "BertForMaskedLM", "masked-lm"),
        ("bert", "BertForPreTraining", "masked-lm"),
        ("bert", "BertForSequenceClassification", "classification"),
        ("bert", "BertForTokenClassification", "tagging"),
        ("gpt2", "GPT2LMHeadModel", "causal-lm"),
        ("llama", "LlamaForCausalLM", "causal-lm"),
        ("mistral", "MistralModel", "similarity"),
        ("marian", "MarianMTModel", "translation"),
        ("m2m_100", "M2M100ForConditionalGeneration", "translation"),
        ("mbart", "MBartForConditionalGeneration", "translation"),
        ("pegasus", "PegasusForConditionalGeneration", "seq2seq"),
        ("t5", "T5ForConditionalGeneration", "seq2seq"),
        ("t5", "T5EncoderModel", "similarity"),
        ("bart", "BartForConditionalGeneration", "seq2seq"),
        ("whisper", "WhisperForConditionalGeneration", "transcription"),
        ("vit", "ViTForImageClassification", "image-classification"),
        ("clip", "CLIPModel", "image-text"),
        ("xlnet", "XLNetLMHeadModel", "permutation-lm"),
    ],
)
def test_the_task_follows_from_the_class(family: str, name: str, kind: str) -> None:
    assert task_of({"model_type": family, "architectures": [name]}) == kind


def test_labels_are_those_of_the_original(tmp_path: Path) -> None:
    names = {0: "bad", 1: "good", 2: "neither"}
    small_bert(tmp_path / "b", None, "BertForSequenceClassification", id2label=names, label2id={})
    found = load(tmp_path / "b")
    assert found.labels == ["bad", "good", "neither"] == about(tmp_path / "b")["labels"]


def test_the_limit_is_the_minimum_of_all_files(tmp_path: Path, words: Tokenizer) -> None:
    small_bert(tmp_path / "b", words)
    assert load(tmp_path / "b").max_tokens == 40
    options = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    for said, expected in ((24, 24), (10**30, 40)):
        (tmp_path / "b" / "tokenizer_config.json").write_text(json.dumps(options | {"model_max_length": said}))
        assert load(tmp_path / "b").max_tokens == expected


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    theirs = small_bert(tmp_path / "b", None)
    model = ayn.load(tmp_path / "b")
    tokens = [[5, 6, 7], [8, 9, 10, 11, 12]]
    found = model.hidden(tokens=tokens)
    for row, ids in zip(found, tokens, strict=True):
        expected = theirs(torch.tensor([ids])).last_hidden_state[0]
        assert (row[: len(ids)] - expected).abs().max() < 1e-5
    with pytest.raises(UserError, match="has no tokenizer; give it token ids instead of texts"):
        model.embed("a text")
    folder = load(tmp_path / "b")
    folder.save(tmp_path / "ours")
    assert Folder.load(tmp_path / "ours").vocabularies is None


# --- other uses -------------------------------------------------------------------------------------------------------


def test_a_masked_model_can_embed_texts(tmp_path: Path, words: Tokenizer) -> None:
    theirs = small_bert(tmp_path / "b", words, "BertForMaskedLM")
    vector = ayn.load(tmp_path / "b", task="similarity").embed("a wonderful film")
    ids = torch.tensor([words.encode("a wonderful film")])
    expected = theirs.bert(ids).last_hidden_state.mean(1)[0]
    assert (vector - expected).abs().max() < 1e-5
    load(tmp_path / "b").save(tmp_path / "ours")
    assert torch.equal(ayn.load(tmp_path / "ours", task="similarity").embed("a wonderful film"), vector)
    for path in (tmp_path / "b", tmp_path / "ours"):
        with pytest.raises(UserError, match="a model for masked-lm has no weights for classification; train it"):
            ayn.load(path, task="classification")


# --- sentence-transformers --------------------------------------------------------------------------------------------


def sentence_folder(path: Path, words: Tokenizer, mode: str, normalised: bool, inside: str = "") -> Any:
    model = small_bert(path / inside, words)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalised else [])]
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{kind}" if n else inside,
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16} | modes))
    (path / inside / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    return model


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
def test_texts_get_the_vectors_of_the_original(
    tmp_path: Path, words: Tokenizer, mode: str, normalised: bool, inside: str
) -> None:
    theirs = sentence_folder(tmp_path / "s", words, mode, normalised, inside)
    model = ayn.load(tmp_path / "s")
    texts = ["a wonderful film", "terrible"]
    assert model.folder.task == {"kind": "similarity"} and model.folder.max_tokens == 12
    for vector, text in zip(model.embed(texts), texts, strict=True):
        hidden = theirs(torch.tensor([words.encode(text)])).last_hidden_state[0]
        expected = {"cls_token": hidden[0], "mean_tokens": hidden.mean(0), "lasttoken": hidden[-1]}[mode]
        expected = torch.nn.functional.normalize(expected, dim=-1) if normalised else expected
        assert (vector - expected).abs().max() < 1e-5


def test_unsupported_pooling_is_refused_by_name(tmp_path: Path, words: Tokenizer) -> None:
    sentence_folder(tmp_path / "s", words, "max_tokens", True)
    with pytest.raises(UserError, match=r"pooling by max is not supported .allowed: cls, mean, lasttoken"):
        ayn.load(tmp_path / "s")
    (tmp_path / "s" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean", "include_prompt": false}')
    with pytest.raises(UserError, match="include_prompt: false is not supported"):
        ayn.load(tmp_path / "s")
    modules = json.loads((tmp_path / "s" / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (tmp_path / "s" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="modules Transformer, Pooling, Dense are not supported"):
        ayn.load(tmp_path / "s")


def test_embeddings_survive_a_round_trip(tmp_path: Path, words: Tokenizer, capsys: Any) -> None:
    sentence_folder(tmp_path / "s", words, "mean_tokens", True)
    for command in (["import", "s", "ours"], ["export", "ours", "back", "--to", "hf"]):
        places = [str(tmp_path / word) if word in ("s", "ours", "back") else word for word in command]
        with pytest.raises(SystemExit) as stopped:
            main(places)
        assert not stopped.value.code, capsys.readouterr()
    vectors = [ayn.load(tmp_path / name).embed(TEXTS[:4]) for name in ("s", "ours", "back")]
    assert torch.equal(vectors[0], vectors[1]) and torch.equal(vectors[0], vectors[2])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["BertModel"]


# --- commands and training --------------------------------------------------------------------------------------------


def test_commands_take_their_folders(tmp_path: Path, words: Tokenizer, capsys: Any) -> None:
    small_bert(tmp_path / "b", words, "BertForSequenceClassification", id2label={0: "bad", 1: "good"})
    (tmp_path / "test.tsv").write_text("a wonderful film\tgood\na terrible film\tbad\n")
    for command, shown in (
        (["describe", tmp_path / "b"], "encoder"),
        (["evaluate", tmp_path / "test.tsv", "-m", tmp_path / "b"], "accuracy"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in command])
        assert not stopped.value.code
        assert shown in capsys.readouterr().out


def test_training_starts_from_their_folder(tmp_path: Path, words: Tokenizer) -> None:
    theirs = small_bert(tmp_path / "b", words, "BertForMaskedLM", hidden_dropout_prob=0.0)
    lines = [f"{text}\t{'good' if 'wonderful' in text else 'bad'}" for text in TEXTS]
    (tmp_path / "data.tsv").write_text("\n".join(lines) + "\n")
    recipe = {
        "task": "classification",
        "start": str(tmp_path / "b"),
        "data": {"train": str(tmp_path / "data.tsv"), "valid": str(tmp_path / "data.tsv"), "max_tokens": 40},
        "batch": {"rows": 4, "row": 40},
        "schedule": {"kind": "constant", "peak": 1e-12},
        "steps": 2,
        "average": 0,
        "device": "cpu",
        "precision": "fp32",
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    result = run(load_recipe(tmp_path / "r.yaml"), console=Console(quiet=True))
    found = Folder.load(result.model)
    assert found.labels == ["bad", "good"] and found.origin["family"] == "bert"
    assert found.model.config.vocabs.source == 300, "the embedding keeps its size, though there are fewer tokens"
    expected = theirs.state_dict()["bert.embeddings.word_embeddings.weight"]
    torch.testing.assert_close(found.model.state_dict()["embed.tokens.weight"], expected, rtol=0, atol=1e-6)
    ayn.load(result.model).classify("a wonderful film")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(UserError):
        run(load_recipe(tmp_path / "r.yaml"), console=Console(quiet=True))


@pytest.mark.parametrize("device", ["foo", "cuda"])
def test_a_missing_device_is_named(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device '{device}'"):
        load(tmp_path, device)


def test_a_class_may_be_named_without_a_list(tmp_path: Path) -> None:
    folder = tinyfolders.write(tmp_path / "theirs", architectures="LlamaForCausalLM")
    assert load(folder).task == {"kind": "causal-lm"}
