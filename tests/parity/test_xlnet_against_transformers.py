"""XLNet: scores and gradients of Hugging Face's models, read as a whole, with two streams, and with memory."""

import pytest
import torch
from transformers import (
    XLNetConfig,
    XLNetForSequenceClassification,
    XLNetForTokenClassification,
    XLNetLMHeadModel,
)

import parity
import trials
from allyouneed.config import override, parse, tree_of
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.two_stream import append_query_stream, query_stream

SMALL = dict(d_model=24, n_head=3, n_layer=2, d_inner=40, vocab_size=31, dropout=0.0, summary_last_dropout=0.0)
CASES = {
    "small": SMALL,
    "odd, relu, clamped, untied": SMALL
    | dict(d_model=20, n_head=5, n_layer=3, d_inner=33, vocab_size=29, ff_activation="relu", clamp_len=3)
    | dict(layer_norm_eps=1e-3, tie_word_embeddings=False),
}
REFERENCE = "transformers XLNetLMHeadModel"
LENGTHS = [9, 6, 2, 7]
TARGETS = [[4, 0], [5], [1], [2, 3, 6]]  # in the order in which they are said


def permuted(lengths, targets):
    """All tokens except targets come first in the order, together."""
    order = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, asked in enumerate(targets):
        for number, place in enumerate(asked):
            order[row, place] = number + 1
    return order


def permutation_mask(order, targets):
    """Their mask: 1 where i must not attend to j. The query stream of a target must not attend to the target."""
    mask = (order[:, None, :] > order[:, :, None]).float()
    for row, asked in enumerate(targets):
        mask[row, asked, asked] = 1
    return mask


def target_mapping(targets, time):
    """Their one-hot rows of target positions; padded with rows of zeros whose results are unused."""
    mapping = torch.zeros(len(targets), max(map(len, targets)), time)
    for row, asked in enumerate(targets):
        for number, place in enumerate(asked):
            mapping[row, number, place] = 1
    return mapping


def some_tokens(rows, time, vocab, seed=1):
    return torch.randint(1, vocab, (rows, time), generator=torch.Generator().manual_seed(seed))


def theirs(name):
    return XLNetLMHeadModel(XLNetConfig(**CASES[name])).eval()


def built(name, folder, kind=XLNetLMHeadModel, **keys):
    theirs = kind(XLNetConfig(**(CASES[name] | keys))).eval()
    parity.randomise(theirs)
    return theirs, parity.ours(theirs, folder)


@pytest.mark.parametrize("types", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_bidirectional(name, types, tmp_path, record_difference):
    """Without an order all tokens see each other, as in their fine-tuning."""
    theirs = XLNetLMHeadModel(XLNetConfig(**CASES[name], use_mems_eval=False)).eval()
    found = trials.encoder(theirs, tmp_path, types)
    record_difference("XLNet", REFERENCE, *found)
    assert max(found) < parity.TOLERANCE


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_streams(name, typed, tmp_path, record_difference):
    theirs, model = built(name, tmp_path, use_mems_eval=False)
    tokens = some_tokens(len(LENGTHS), max(LENGTHS), theirs.config.vocab_size)
    order, types = permuted(LENGTHS, TARGETS), torch.arange(tokens.numel()).view_as(tokens) // 4 % 3
    real = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    expected = theirs(
        input_ids=tokens,
        attention_mask=real.float(),
        perm_mask=permutation_mask(order, TARGETS),
        target_mapping=target_mapping(TARGETS, max(LENGTHS)),
        token_type_ids=types if typed else None,
    ).logits
    rows = Rows(tokens, lengths=torch.tensor(LENGTHS), order=order, types=types if typed else None)
    logits = model.logits(Batch(append_query_stream(rows, TARGETS)))
    asked = [(row, number) for row, places in enumerate(TARGETS) for number in range(len(places))]
    found = torch.stack([logits[row, LENGTHS[row] + number] for row, number in asked])
    expected = torch.stack([expected[row, number] for row, number in asked])
    outputs = parity.difference(found, expected)
    weights = trials.weighed
    gradients = parity.gradient_difference(model, theirs, tmp_path, weights(found), weights(expected))
    record_difference("XLNet", REFERENCE, outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_packed_rows_match_padded_rows(tmp_path):
    """Two texts in one row, each followed by its query stream."""
    _, model = built("small", tmp_path)
    tokens, order = some_tokens(2, 9, 31), permuted([9, 6], TARGETS[:2])
    rows = append_query_stream(Rows(tokens, lengths=torch.tensor([9, 6]), order=order), TARGETS[:2])
    expected, sizes = model.logits(Batch(rows)), rows.lengths.tolist()

    def packed(values):
        return torch.cat([values[row, :size] for row, size in enumerate(sizes)])[None]

    numbers = torch.tensor([1] * sizes[0] + [2] * sizes[1])[None]
    together = Rows(packed(rows.tokens), segments=numbers, positions=packed(rows.positions), order=packed(rows.order))
    assert parity.difference(model.logits(Batch(together)), packed(expected)) < parity.TOLERANCE


@pytest.mark.parametrize("memory", [None, 5])
@pytest.mark.parametrize("name", CASES)
def test_segments_with_memory(name, memory, tmp_path, record_difference):
    """Two segments read from both sides, then one with two streams, over all there was or over the last segment."""
    theirs, whole = built(name, tmp_path, mem_len=memory)
    tree = tree_of(whole.config)
    if memory is not None:
        tree = override(tree, [f"encoder[0].mixer.pattern=permuted & block-window({memory}, 2)"])
    model = parse(Model, tree).build().eval()
    model.load_state_dict(whole.state_dict())
    tokens, targets = some_tokens(2, 15, theirs.config.vocab_size), [[3, 0], [4, 1]]
    order, types = permuted([5, 5], targets), torch.tensor([[0, 0, 1, 1, 2], [1, 1, 1, 0, 0]])
    mems, states = None, model.start(2)
    for segment in tokens[:, :10].split(5, 1):
        result = theirs(input_ids=segment, mems=mems, use_mems=True)
        mems = result.mems
        found = model.head(model.advance(Rows(segment), states))
        states.detach()
        assert parity.difference(found, result.logits) < parity.TOLERANCE
    expected = theirs(
        input_ids=tokens[:, 10:],
        mems=mems,
        perm_mask=permutation_mask(order, targets),
        target_mapping=target_mapping(targets, 5),
        token_type_ids=types,
    ).logits
    rows = Rows(tokens[:, 10:], order=order, types=types)
    hidden = model.advance(rows, states, query_stream(rows, torch.tensor(targets)))
    found = model.head(hidden[:, 5:])
    outputs = parity.difference(found, expected)
    weights = trials.weighed
    gradients = parity.gradient_difference(model, theirs, tmp_path, weights(found), weights(expected))
    record_difference("XLNet", REFERENCE, outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_tags(tmp_path, record_difference):
    theirs = XLNetForTokenClassification(XLNetConfig(**SMALL, num_labels=4, use_mems_eval=False)).eval()
    found = trials.encoder(theirs, tmp_path, types=3)
    record_difference("XLNet", "transformers XLNetForTokenClassification", *found)
    assert max(found) < parity.TOLERANCE


def test_classes(tmp_path, record_difference):
    """They classify by the last column, so all texts fill their rows."""
    theirs = XLNetForSequenceClassification(XLNetConfig(**SMALL, num_labels=4, use_mems_eval=False)).eval()
    found = trials.encoder(theirs, tmp_path, types=3, texts=[text[:3] for text in trials.TEXTS if len(text) >= 3])
    record_difference("XLNet", "transformers XLNetForSequenceClassification", *found)
    assert max(found) < parity.TOLERANCE


def test_unsupported_settings_are_refused_by_name():
    config = XLNetConfig(attn_type="uni", bi_data=True, summary_type="mean").to_dict()
    with pytest.raises(UserError, match=r"(?s)attn_type: 'uni'.*bi_data: True.*summary_type: 'mean'"):
        FAMILIES["xlnet"].tree(config)
