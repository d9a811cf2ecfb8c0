"""Masked tokens and sentence pairs: loss and gradients of Hugging Face's BertForPreTraining and AlbertForPreTraining,
with packed rows here and padded ones there."""

import pytest
import torch
from transformers import AlbertConfig, AlbertForPreTraining, BertConfig, BertForPreTraining

import parity
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.tasks.language.masked_lm import MaskedLM

SIZES = dict(
    hidden_size=24,
    num_attention_heads=3,
    num_hidden_layers=2,
    intermediate_size=40,
    vocab_size=31,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
THEIRS = {
    "next-sentence": (lambda: BertForPreTraining(BertConfig(**SIZES)), "next_sentence_label"),
    "sentence-order": (
        lambda: AlbertForPreTraining(AlbertConfig(**SIZES, embedding_size=10, classifier_dropout_prob=0.0)),
        "sentence_order_label",
    ),
}
TEXTS = [[2, 5, 11, 3, 12, 6, 3], [2, 4, 3, 9, 10, 3], [2, 7, 7, 7, 3, 8, 3]]
KINDS = [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]]
WANTED = [{1: 5, 4: 13}, {3: 9}, {2: 8, 3: 7, 5: 30}]
CLASSES = [1, 0, 1]


def labels(number, own):
    found = [WANTED[number].get(at, IGNORE) for at in range(len(TEXTS[number]))]
    return [IGNORE - 1 - CLASSES[number], *found[1:]] if own else found


@pytest.mark.parametrize("pairs", THEIRS)
def test_loss_and_gradients(pairs, tmp_path, record_difference):
    make, name = THEIRS[pairs]
    theirs = make().eval()
    parity.randomise(theirs)
    model = parity.ours(theirs, tmp_path)
    padded = Rows.of(TEXTS)
    expected = theirs(
        input_ids=padded.tokens,
        attention_mask=(torch.arange(7)[None] < torch.tensor([7, 6, 7])[:, None]).long(),
        token_type_ids=Rows.of(KINDS).tokens,
        labels=Rows.of([labels(n, False) for n in range(3)], pad=IGNORE).tokens,
        **{name: torch.tensor(CLASSES)},
    )
    flat = {n: [one for text in parts for one in text] for n, parts in {"tokens": TEXTS, "types": KINDS}.items()}
    packed = Rows(
        **{n: torch.tensor([values]) for n, values in flat.items()},
        segments=torch.tensor([[n + 1 for n, text in enumerate(TEXTS) for _ in text]]),
        positions=torch.tensor([[at for text in TEXTS for at in range(len(text))]]),
    )
    own = torch.tensor([[one for n in range(3) for one in labels(n, True)]])
    loss = MaskedLM(pairs=pairs).loss(model, Batch(packed, labels=own))
    assert loss.tokens == 6 and loss.figures["pair-accuracy"] / 6 in (0, *(pytest.approx(k / 0.03) for k in (1, 2, 3)))
    outputs = parity.difference(loss.total / loss.tokens, expected.loss)
    gradients = parity.gradient_difference(model, theirs, tmp_path, loss.total / loss.tokens, expected.loss)
    record_difference(type(theirs).__name__, f"transformers {type(theirs).__name__}", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.mark.parametrize("pairs", THEIRS)
def test_heads_come_back_as_they_were(pairs, tmp_path):
    theirs = THEIRS[pairs][0]()
    config, weights = parity.saved(theirs, tmp_path)
    family = FAMILIES[config["model_type"]]
    model = family.convert(config, weights)
    written, back = family.write(model, None, family.unused(config, weights))
    assert written["architectures"] == config["architectures"] and model.config.head.pair
    assert set(back) == set(weights) and all(back[name].equal(weights[name]) for name in weights)
