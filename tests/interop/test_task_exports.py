"""A model of every task, exported: transformers computes what ours computes, from the text on, without being told more.
What would not be exact is refused and leaves nothing, whether or not transformers is installed."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import parity
from allyouneed.config import override, parse, preset_names, preset_tree, tree_of
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.errors import UserError
from allyouneed.files import write_folder
from allyouneed.folder import Folder
from allyouneed.infer.predictors.forward import NamedForward
from allyouneed.interop import read_back
from allyouneed.interop.export import writer
from allyouneed.interop.hf.weight_table import Family
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.tasks.task import Task
from shrink import shrink

TEXTS = ["the small cat sat on the mat", "das kleine Haus ist rot"]
WORDS = (400, TEXTS * 3)
NEEDS_ACCELERATE = "bitnet-b1.58-2b"  # transformers does not load it without
# of presets that differ in sizes only, the first; a preset without text has no tokenizer to go with it
PRESETS = list(
    {
        json.dumps(tree_of(shrink(whole))): name
        for name in reversed(preset_names())
        if (whole := parse(Model, preset_tree(name))).kind in ("encoder", "decoder", "encoder-decoder")  # type: ignore[type-abstract]
        and all(embed.reads is Rows for embed in (whole.embed, getattr(whole, "source_embed", None) or whole.embed))
        and name != NEEDS_ACCELERATE
    }.values()
)
CAUSAL = ("decoder", "vocabulary")


@cache
def vocabularies(specials: tuple[str, ...]) -> Vocabularies:
    both = train(TokenizerConfig(vocab=WORDS[0], specials=specials), WORDS[1], ["de"])
    return Vocabularies(both, both)


def made(task: str, preset: str, *changes: str) -> Folder | None:
    """A small model of this task with random weights; None where the task does not train such a model."""
    tree: Any = preset_tree(preset)
    known = parse(Task, {"kind": task})  # type: ignore[type-abstract]
    if tree["kind"] not in known.kinds:
        return None
    labels = ["bad", "good", "so-so"] if {"classes", "tags"} & set(known.heads) else None
    try:
        head = known.head(tree, labels)
        tree = {key: value for key, value in tree.items() if key != "head"} | ({} if head is None else {"head": head})
        known.for_model(tree)
        small = tree_of(shrink(parse(Model, override(tree, changes), preset)))  # type: ignore[type-abstract]
    except (UserError, ValueError):  # the task cannot train this model
        return None
    both = vocabularies(known.specials())
    small["vocab"] = both.source.size
    model = parse(Model, small, preset).build().eval()  # type: ignore[type-abstract]
    parity.randomise(model)
    if task == "replaced-token":
        labels = None
    if task == "preference":
        labels = ["reward"]
    return Folder(model, both, {"kind": task}, max_tokens=20, labels=labels or [])


def exported(folder: Folder, out: Path) -> Path:
    write_folder(out, lambda path: writer("hf")(folder, path) and None)
    return out


def texts_of(folder: Folder) -> list[tuple[str, ...]]:
    """One text, and a pair where the model reads pairs."""
    pairs = tree_of(folder.model.config)["kind"] == "encoder"  # type: ignore[arg-type]
    return [(TEXTS[0],), (TEXTS[0], TEXTS[1])] if pairs else [(TEXTS[0],)]


def ours(folder: Folder, texts: tuple[str, ...]) -> Tensor:
    config: Any = folder.model.config
    source, target, kind = folder.tokenizers.source, folder.tokenizers.target, tree_of(config)["kind"]
    ids = [source.encode(text) for text in texts]
    given: dict[str, Any] = {}
    if kind == "encoder-decoder":
        before, after = source.source_affixes
        given |= {"tokens": [[*before, *ids[0], *after]], "targets": [[*target.opening, *target.encode(TEXTS[1])]]}
    elif (kind, config.head.kind) == CAUSAL:
        given["tokens"] = [[*target.opening, *ids[0]]]
    else:
        tokens, types = source.frame(*ids)
        given |= {"tokens": [tokens]} | ({"types": [types]} if config.reads_types else {})
    forward = NamedForward(folder.model)
    pooled: Tensor = forward.hidden(given) if config.head.kind == "pooled" else forward.logits(given)
    return pooled


@torch.no_grad()
def theirs(folder: Folder, out: Path, texts: tuple[str, ...]) -> Tensor:
    """What a call of their tokenizer and of their class gives, nothing else being known."""
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(
        out, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other one wants sizes that are multiples of 4
    given = transformers.AutoTokenizer.from_pretrained(out)(*texts, return_tensors="pt")
    if model.config.is_encoder_decoder:
        target = folder.tokenizers.target
        start = model.config.decoder_start_token_id
        given["decoder_input_ids"] = torch.tensor([[start, *target.encode(TEXTS[1])]])
    result = model.eval()(**given)
    if "start_logits" in result:
        return torch.stack([result.start_logits, result.end_logits], -1)
    found: Tensor = result.logits if "logits" in result else result.last_hidden_state
    return found


# tasks that share the models of another one are tried with one of them
SAME = {
    "chat": "causal-lm",
    "dpo": "causal-lm",
    "ppo": "causal-lm",
    "prefix-lm": "causal-lm",
    "contrastive": "similarity",
}
SAME |= {"translation-lm": "masked-lm", "span-corruption": "translation"}
CASES = [
    (task, preset)
    for task in Task.registry
    for preset in (PRESETS if task not in SAME else ["gpt2", "bert-base", "t5-small"])
    if preset_tree(preset)["kind"] in Task.registry[task].kinds
]


@pytest.mark.parametrize(("task", "preset"), CASES)
def test_an_export_is_exact_or_refused(task: str, preset: str, tmp_path: Path) -> None:
    folder = made(task, preset)
    if folder is None:
        return
    try:
        out = exported(folder, tmp_path / "out")
    except UserError as error:
        assert not any(tmp_path.iterdir())
        assert re.search("cannot be expressed|no counterpart|required|embed.types|the tokenizer pads with", str(error))
        return
    for texts in texts_of(folder):
        assert (
            parity.difference(theirs(folder, out, texts).view_as(ours(folder, texts)), ours(folder, texts))
            < parity.TOLERANCE
        )


def test_a_classifier_with_berts_pooler_is_a_bert(tmp_path: Path) -> None:
    folder = made("classification", "bert-base", "head.hidden=tanh")
    assert folder is not None
    config = json.loads((exported(folder, tmp_path / "out") / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert list(config["label2id"]) == folder.labels
    for texts in texts_of(folder):
        assert parity.difference(theirs(folder, tmp_path / "out", texts), ours(folder, texts)) < parity.TOLERANCE


@pytest.mark.parametrize("changes", [[], ["head.pool=mean"], ["head.pool=last"], ["head.hidden=relu"]])
@pytest.mark.parametrize("preset", ["bert-base", "xlm-15"])
def test_a_classifier_that_no_class_of_theirs_computes_is_refused(
    preset: str, changes: list[str], tmp_path: Path
) -> None:
    """Only XLM's has such a head, and XLM adds no vector for token types that it is not given."""
    folder = made("classification", preset, *changes)
    assert folder is not None
    with pytest.raises(UserError, match=r"head\.(hidden|pool): .*cannot be expressed") as refusal:
        exported(folder, tmp_path / "out")
    assert changes or "xlm: embed.types: " in str(refusal.value)
    assert not any(tmp_path.iterdir())


# what an exporter might get wrong: what it writes, and what is then told
WRONG: dict[str, tuple[str, Any, str]] = {
    "an option": ("config.json", lambda tree: tree | {"hidden_act": "relu"}, "channel.activation: 'gelu' cannot"),
    "labels": ("config.json", lambda tree: tree | {"id2label": {"0": "x", "1": "y", "2": "z"}}, "labels: bad, good"),
    "token types": (
        "tokenizer_config.json",
        lambda tree: tree | {"model_input_names": ["input_ids", "attention_mask"]},
        "token types of a pair of texts",
    ),
    "special tokens": (
        "tokenizer.json",
        lambda tree: tree | {"post_processor": None},
        "token ids of a text with special tokens",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_read_back_otherwise_is_refused_by_name(what: str, tmp_path: Path) -> None:
    folder = made("classification", "bert-base", "head.hidden=tanh")
    assert folder is not None
    file, change, told = WRONG[what]
    out = exported(folder, tmp_path / "out")
    (out / file).write_text(json.dumps(change(json.loads((out / file).read_text()))))
    with pytest.raises(UserError, match=f"(?s)the export would not be exact, so nothing was written.*{told}"):
        read_back.check_exported(folder, out)


def test_other_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("causal-lm", "gpt2")
    assert folder is not None
    right = Family.export_weights

    def wrong(family: Family, model: Any, config: Any) -> dict[str, Tensor]:
        return {name: weight * 1.01 for name, weight in right(family, model, config).items()}

    monkeypatch.setattr(Family, "export_weights", wrong)
    with pytest.raises(UserError, match="outputs of a small batch would differ by"):
        exported(folder, tmp_path / "out")
    assert not any(tmp_path.iterdir())
