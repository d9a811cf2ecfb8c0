"""BigBird: scores and gradients of Hugging Face's BigBirdForMaskedLM, and our own BigBird against its definition.

Theirs pads a batch to blocks, so that results depend on the rest of the batch; each one is compared alone with ours in
one batch. In evaluation they draw no random blocks; what they do instead is nn/mixers/attention/big_bird.py's.
"""

import pytest
import torch
from transformers import BigBirdConfig, BigBirdForMaskedLM

import parity
import trials
from allyouneed.config import parse
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model

SIZES = dict(vocab_size=31, max_position_embeddings=90, sep_token_id=2)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CASES = {
    "small": dict(hidden_size=24, num_attention_heads=3, intermediate_size=40, block_size=2, num_random_blocks=1),
    "odd, three random blocks, no bias, scaled": dict(
        hidden_size=35,
        num_attention_heads=5,
        intermediate_size=19,
        block_size=3,
        num_random_blocks=3,
        use_bias=False,
        rescale_embeddings=True,
        hidden_act="relu",
    ),
    "untied, large blocks": dict(
        hidden_size=20,
        num_attention_heads=2,
        intermediate_size=33,
        block_size=5,
        num_random_blocks=2,
        tie_word_embeddings=False,
    ),
}


def build(name, **others):
    config = BigBirdConfig(**CASES[name], **SIZES, **NO_DROPOUT, **others, num_hidden_layers=2)
    return BigBirdForMaskedLM(config).eval()


theirs = build


@pytest.mark.parametrize("name", CASES)
def test_whole_attention(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder(build(name, attention_type="original_full"), tmp_path, 2)
    record_difference("BigBird", "transformers BigBirdForMaskedLM, original_full", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def sentence_by_sentence(model, theirs):
    """Scores of ours, in one batch, and of theirs, one alone after another; some are still attended to as a whole."""
    dice, whole = torch.Generator().manual_seed(0), (5 + 2 * theirs.config.num_random_blocks) * theirs.config.block_size
    lengths = [whole + 1, 80, whole, 9, whole + theirs.config.block_size + 1]
    texts = [torch.randint(3, 31, (length,), generator=dice).tolist() for length in lengths]
    rows, alone = Rows.of(texts), []
    for text in texts:
        theirs.bert.set_attention_type("block_sparse")  # it switches to full attention automatically, but not back
        alone.append(theirs(input_ids=torch.tensor([text])).logits[0])
    return model.logits(Batch(rows))[trials.real(rows)], torch.cat(alone)


@pytest.mark.parametrize("name", CASES)
def test_sparse_attention(name, tmp_path, record_difference):
    """Gradients in double precision: they are sums over 200 tokens, and those of keys' biases should be zero."""
    theirs = build(name)
    parity.randomise(theirs)
    model = parity.ours(theirs, tmp_path)
    outputs = parity.difference(*sentence_by_sentence(model, theirs))
    found, expected = sentence_by_sentence(model.double(), theirs.double())
    assert parity.difference(found, expected) < parity.TOLERANCE
    losses = trials.weighed(found), trials.weighed(expected)
    gradients = parity.gradient_difference(model, theirs, tmp_path, *losses)
    record_difference("BigBird", "transformers BigBirdForMaskedLM, block_sparse", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_packed_rows_match_single_sentences(tmp_path):
    theirs = build("small")
    parity.randomise(theirs)
    model = parity.ours(theirs, tmp_path)
    tokens = torch.randint(3, 31, (1, 50), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([[1] * 31 + [2] * 17 + [0] * 2])
    packed = model.logits(Batch(Rows(tokens, segments=segments)))
    for part in (slice(0, 31), slice(31, 48)):
        torch.testing.assert_close(packed[:, part], model.logits(Batch(Rows(tokens[:, part]))), rtol=1e-5, atol=1e-5)


def test_the_bigbird_pattern_matches_its_definition(record_difference):
    """Blocks of 2, a window of 3 blocks, 2 global blocks and 2 random ones, evaluated pair by pair."""
    tree = FAMILIES["big_bird"].tree(build("small", attention_type="original_full").config.to_dict())
    pattern = "block-window(2, 2) | global-prefix(4) | random-blocks(2, 2, 7)"
    tree["encoder"][0]["mixer"]["pattern"] = pattern
    sparse = parse(Model, tree).build().eval()
    tokens = torch.randint(3, 31, (2, 40), generator=torch.Generator().manual_seed(2))
    found = sparse.logits(Batch(Rows(tokens)))

    drawn = sparse.config.encoder[0].mixer.pattern.right.mask(40, 40)[::2, ::2]  # block by block
    assert torch.equal(drawn, drawn.T) and 18 <= drawn.tril(-1).sum() <= 2 * 19
    block, place = torch.arange(40) // 2, range(40)
    seen = [[abs(block[q] - block[k]) <= 1 or min(q, k) < 4 or drawn[block[q], block[k]] for k in place] for q in place]
    hidden = sparse.embed(Rows(tokens), sparse.embed.layout(Rows(tokens)))
    for block in sparse.encoder.blocks:
        mixer, norms = block.sublayers["mixer"], block.wiring.norms
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in mixer.qkv(hidden).chunk(3, -1))
        weights = (q @ k.mT / 8**0.5).masked_fill(~torch.tensor(seen), -torch.inf).softmax(-1)
        looked = mixer.out((weights @ v).transpose(1, 2).flatten(2))
        hidden = norms[0](hidden + looked, None)
        hidden = norms[1](hidden + block.sublayers["channel"](hidden, None), None)
    outputs = parity.difference(found, sparse.head(hidden))
    record_difference("BigBird", "its definition, key by key", outputs)
    assert outputs < parity.TOLERANCE
