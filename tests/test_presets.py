"""Every preset in the folder is read, written, built and run."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from allyouneed.config import PRESETS, ConfigError, override, parse, preset_names, preset_tree, to_yaml, tree_of
from allyouneed.nn.batch import IGNORE, Batch, Rows, Signal
from allyouneed.nn.heads.vocabulary import VocabularyHead
from allyouneed.nn.models.base import Model
from allyouneed.tasks.translation.mask_predict import MaskPredict
from parameter_count import parameter_count
from shrink import batch_for, shrink

every_preset = pytest.mark.parametrize("name", preset_names())


@functools.cache
def preset(name):
    return parse(Model, preset_tree(name))


@functools.cache
def small(name):
    return shrink(preset(name))


def generates(name):
    try:
        return preset(name).generates
    except ConfigError:
        return True  # reported by its own tests, not by all of them


def built(config):
    torch.manual_seed(0)
    return config.build()


@every_preset
def test_a_preset_says_first_where_it_comes_from(name):
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    comment = "".join(line for line in text.splitlines() if line.startswith("#"))
    cited = any(str(year) in comment for year in range(2014, 2027)) or "not a configuration of the paper" in comment
    assert text.startswith("#") and cited


@every_preset
@pytest.mark.parametrize("full", [True, False])
def test_yaml_to_config_and_back_loses_nothing(name, full):
    config = preset(name)
    assert parse(Model, tree_of(config, full)) == config
    text = to_yaml(config, full)
    assert parse(Model, yaml.safe_load(text)) == config
    assert to_yaml(parse(Model, yaml.safe_load(text)), full) == text


@every_preset
def test_a_module_keeps_its_config_and_costs_what_that_says(name):
    assert preset(name).cost().parameters == parameter_count(preset(name))


@every_preset
def test_a_shrunk_preset_has_the_same_parts(name):
    """Only numbers differ."""

    def words(tree):
        if isinstance(tree, dict):
            return {key: words(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [words(value) for value in tree]
        return "".join(letter for letter in tree if not letter.isdigit()) if isinstance(tree, str) else None

    assert words(tree_of(small(name))) == words(tree_of(preset(name)))


def loss_of(model, batch):
    """The loss of a task: likelihood of random labels, or of each text's own image."""
    losses = []
    dice = torch.Generator().manual_seed(1)
    if isinstance(getattr(model.config, "head", None), VocabularyHead):
        rows = batch.target
        if isinstance(rows, Signal):
            hidden = model(batch, losses)
            labels = torch.randint(1, model.config.vocab, hidden.shape[:2], generator=dice)
            return model.head.loss(hidden, labels, 0.1)[0] / labels.numel() + sum(losses)
        labels = torch.randint(1, 50, rows.tokens.shape, generator=dice)
        labels[torch.arange(rows.tokens.shape[1])[None] >= rows.lengths[:, None]] = IGNORE
        if not model.config.head.causal:  # it predicts the length, too
            found = MaskPredict().loss(model, replace(batch, labels=labels))
            return found.total / found.tokens
        total, _ = model.head.loss(model(batch, losses), labels, 0.1)
        return total / (labels != IGNORE).sum() + sum(losses)
    scores = model.logits(batch)
    if scores.dim() == 1:  # log-odds
        clicks = torch.randint(0, 2, scores.shape, generator=dice).to(scores.dtype)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, clicks)
    if model.config.kind == "two-towers":
        labels = torch.arange(len(scores))
    else:
        labels = torch.randint(0, scores.shape[-1], scores.shape[:-1], generator=dice)
    return torch.nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


@every_preset
def test_a_shrunk_preset_trains(name):
    """The loss of a batch falls, and every parameter contributes to it."""
    model, batch = built(small(name)).train(), batch_for(small(name))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    moved, losses = set(), []
    for _ in range(8):
        loss = loss_of(model, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        moved |= {key for key, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert losses[-1] < losses[0] - 0.01
    assert {key for key, _ in model.named_parameters()} - moved == set()


TEXT = (Path(__file__).parent.parent / "docs" / "parts.md").read_text(encoding="utf-8")
LETTERS = {letter: rank for rank, (letter, _) in enumerate(Counter(TEXT).most_common(), 1)}


def reads_text(name):
    config = preset(name)
    told = [getattr(config, "embed", None), getattr(config, "source_embed", None)]
    text = all(embed is None or (embed.reads is Rows and not getattr(embed, "asks", False)) for embed in told)
    return text and isinstance(getattr(config, "head", None), VocabularyHead)


def lesson(config, step, size=16):
    """Real text, letter by letter: what comes next, or which letters are hidden, or the same text again."""
    dice = torch.Generator().manual_seed(step)
    rows = [TEXT[start : start + size + 1] for start in torch.randint(0, len(TEXT) - size - 1, (8,), generator=dice)]
    letters = torch.tensor([[min(LETTERS[letter], 49) for letter in row] for row in rows])
    if config.kind == "encoder":
        hidden = torch.rand(letters[:, 1:].shape, generator=dice) < 0.15
        hidden[:, 3] = True
        return Batch(Rows(letters[:, 1:].masked_fill(hidden, 0)), labels=letters[:, 1:].masked_fill(~hidden, IGNORE))
    source = Rows(letters[:, 1:]) if config.kind == "encoder-decoder" else None
    return Batch(Rows(letters[:, :-1]), source, letters[:, 1:])


# of each kind of model, and the mixers whose gradients no library computes; all presets learn in `make test-all`
QUICK_TO_LEARN = ("transformer-tiny", "gpt2", "bert-base", "retnet-1.3b", "rwkv-4-169m", "yoco-3b", "mixtral-8x7b")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_TO_LEARN else pytest.param(name, marks=pytest.mark.slow)
        for name in preset_names()
        if reads_text(name)
    ],
)
def test_a_shrunk_preset_learns_real_text(name):
    config = small(name)
    model, losses = built(config).train(), []
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        batch, extra = lesson(config, step), []
        total, plain = model.head.loss(model(batch, extra), batch.labels, 0.0)
        count = (batch.labels != IGNORE).sum()
        optimiser.zero_grad()
        (total / count + sum(extra)).backward()
        optimiser.step()
        losses.append((plain / count).item())
    assert sum(losses[-10:]) / 10 < sum(losses[:5]) / 5 - 0.2


def served(tree):
    """The config without a capacity of its experts: with one, results depend on the rest of the batch."""
    if isinstance(tree, dict):
        return {key: None if key == "capacity" else served(value) for key, value in tree.items()}
    return [served(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("name", [name for name in preset_names() if generates(name)])
def test_a_shrunk_preset_decodes_the_same_token_by_token(name):
    config = parse(Model, served(tree_of(small(name))))
    model, batch = built(config).eval(), batch_for(config)
    rows = batch.target
    with torch.no_grad():
        expected = model.logits(batch)
        if config.kind == "interleaved":
            states, rows = model.start(len(rows.tokens)), model.rows(batch)
        else:
            states = model.start(len(rows.tokens)) if batch.source is None else model.start(batch.source)
        columns = [Rows(column) for column in rows.tokens.split(1, 1)]
        if rows.vectors is not None:
            filled = zip(columns, rows.slots.split(1, 1), rows.vectors.split(1, 1), strict=True)
            columns = [replace(column, slots=slots, vectors=vectors) for column, slots, vectors in filled]
        found = torch.cat([model.head(model.advance(column, states)) for column in columns], 1)
    real = torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", ["tiny", "small", "base", "big"])
def test_what_the_yaml_says_is_what_is_built(size):
    """Count in the module what a reader of the YAML would count."""
    tree = preset_tree(f"transformer-{size}")
    with torch.device("meta"):
        model = parse(Model, tree).build()
    sublayers = {"encoder": ["mixer", "channel"], "decoder": ["mixer", "cross", "channel"]}
    for side in ("encoder", "decoder"):
        assert len(getattr(model, side).blocks) == sum(layer["repeat"] for layer in tree[side])
        for block in getattr(model, side).blocks:
            assert list(block.sublayers) == sublayers[side]
            assert block.sublayers["mixer"].heads == tree[side][0]["mixer"]["heads"]
            assert block.sublayers["channel"].up.weight.shape == (tree[side][0]["channel"]["hidden"], tree["width"])
            assert block.wiring.dropout.p == tree["dropout"]
    assert model.embed.tokens.weight.shape == (tree["vocab"], tree["width"])
    assert model.head.weight is model.embed.tokens.weight


def test_the_design_page_shows_the_base_model():
    """docs and preset say the same: the YAML a person would write first is the paper's base model without dropout."""
    text = """
kind: encoder-decoder
vocab: 37000
width: 512
embed: {positions: {kind: sinusoidal}, scale: sqrt-width, tied: true}
encoder:
  - repeat: 6
    wiring: post-norm
    mixer: {kind: attention, heads: 8}
    channel: {kind: ffn, hidden: 2048, activation: relu}
decoder:
  - repeat: 6
    wiring: post-norm
    mixer: {kind: attention, heads: 8, pattern: causal}
    cross: {kind: attention, heads: 8}
    channel: {kind: ffn, hidden: 2048, activation: relu}
"""
    written = parse(Model, yaml.safe_load(text))
    assert written == parse(Model, override(preset_tree("transformer-base"), ["dropout=0"]))
