"""Replaced-token detection: losses and gradients of Hugging Face's ElectraForMaskedLM and ElectraForPreTraining that
share embeddings, with packed rows here and padded ones there."""

import pytest
import torch
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

import parity
from allyouneed.config import tree_of
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.encoder import Encoder, without_generator
from allyouneed.tasks.language import replaced_token
from allyouneed.tasks.language.replaced_token import ReplacedToken

SIZES = dict(
    vocab_size=31,
    embedding_size=10,
    num_hidden_layers=2,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
SMALL, LARGE = (
    SIZES | dict(hidden_size=width, num_attention_heads=heads, intermediate_size=2 * width)
    for width, heads in ((12, 2), (24, 3))
)
TEXTS = [[2, 5, 4, 3, 12, 4, 3], [2, 4, 3, 9, 10], [2, 7, 4, 4, 3, 8]]  # 4 is the mask
RIGHT, DRAWN = [6, 13, 9, 8, 7], [6, 14, 20, 8, 9]  # the masked tokens, and what is drawn for them


def filled(values, empty):
    given = iter(values)
    return [[next(given) if one == 4 else (one if empty is None else empty) for one in text] for text in TEXTS]


def joined(small, large):
    """Our model with the weights of both; the large one's embeddings are theirs."""
    one, other = FAMILIES["electra"].convert(*small), FAMILIES["electra"].convert(*large)
    generator = tree_of(one.config)
    model = Encoder(**tree_of(other.config) | {"generator": generator}).build()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for prefix, part in (("", other), ("generator.", one)):
            for name, weight in part.named_parameters():
                if prefix + name in own:
                    own[prefix + name].copy_(weight)
    return model.eval()


@pytest.mark.parametrize("weight", [50.0, 1.0])
def test_losses_and_gradients(weight, tmp_path, monkeypatch, record_difference):
    small, large = (
        ElectraForMaskedLM(ElectraConfig(**SMALL)).eval(),
        ElectraForPreTraining(ElectraConfig(**LARGE)).eval(),
    )
    for seed, theirs in enumerate((small, large)):
        parity.randomise(theirs, seed)
    small.electra.embeddings = large.electra.embeddings
    small.generator_lm_head.weight = large.electra.embeddings.word_embeddings.weight
    folders = [tmp_path / "small", tmp_path / "large"]
    model = joined(*(parity.saved(*both) for both in zip((small, large), folders, strict=True)))
    assert sum(one.numel() for one in model.parameters()) == model.config.cost().parameters

    mask = (torch.arange(7)[None] < torch.tensor([7, 5, 6])[:, None]).long()
    wanted, drawn, right = (
        Rows.of(*one).tokens
        for one in ((filled(RIGHT, IGNORE), IGNORE), (filled(DRAWN, None),), (filled(RIGHT, None),))
    )
    guessed = small(input_ids=Rows.of(TEXTS).tokens, attention_mask=mask, labels=wanted).loss
    told = large(input_ids=drawn, attention_mask=mask, labels=(drawn != right).long()).loss
    expected = guessed + weight * told

    monkeypatch.setattr(replaced_token, "draw", lambda scores, random: torch.tensor(DRAWN))
    packed = Rows(
        torch.tensor([[one for text in TEXTS for one in text]]),
        segments=torch.tensor([[n + 1 for n, text in enumerate(TEXTS) for _ in text]]),
        positions=torch.tensor([[at for text in TEXTS for at in range(len(text))]]),
    )
    labels = torch.tensor([[one for text in filled(RIGHT, IGNORE) for one in text]])
    loss = ReplacedToken(weight=weight).loss(model, Batch(packed, labels=labels))
    found = loss.total / loss.tokens
    assert parity.difference(loss.figures["generator-loss"] / 5, guessed.detach()) < parity.TOLERANCE
    assert parity.difference(loss.figures["model-loss"] / 5, told.detach()) < parity.TOLERANCE
    outputs = parity.difference(found, expected)
    found.backward()
    expected.backward()
    with torch.no_grad():
        for parameter in {*small.parameters(), *large.parameters()}:
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    carried = joined(*(parity.saved(*both) for both in zip((small, large), folders, strict=True)))
    theirs = dict(carried.named_parameters())
    gradients = max(
        parity.difference(one.grad, theirs[name])
        for name, one in model.named_parameters()
        if one.grad is not None and theirs[name].any()
    )
    record_difference(
        "ELECTRA, both models", "transformers ElectraForMaskedLM + ElectraForPreTraining", outputs, gradients
    )
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
    assert all(one.grad is not None for one in model.parameters())


def test_the_model_alone_has_the_same_scores(tmp_path):
    parts = [
        cls(ElectraConfig(**sizes)) for cls, sizes in ((ElectraForMaskedLM, SMALL), (ElectraForPreTraining, LARGE))
    ]
    model = joined(*(parity.saved(one, tmp_path / str(n)) for n, one in enumerate(parts)))
    alone = without_generator(model)
    batch = Batch(Rows.of(TEXTS))
    assert torch.equal(model.logits(batch), alone.logits(batch))
    assert not [name for name in dict(alone.named_parameters()) if "generator" in name]
    assert FAMILIES["electra"].write(alone, None, {})[0]["architectures"] == ["ElectraForPreTraining"]
