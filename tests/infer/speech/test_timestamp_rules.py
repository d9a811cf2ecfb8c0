"""Whisper's rules for the next token, one by one, against a plain implementation for one row at a time."""

import pytest
import torch

from allyouneed.data.media.speech import Speech
from allyouneed.infer.speech.timestamp_rules import TimestampRules

END, START, NOTIMES, TIME, VOCAB = 10, 11, 12, 13, 30
SPEECH = Speech(start=START, end=END, no_timestamps=NOTIMES, suppress=(3,), begin_suppress=(4, END), first_within=0.1)


def allowed(said, logits=None, timestamps=True):
    given = torch.zeros(1, VOCAB) if logits is None else logits
    left = TimestampRules(SPEECH, timestamps, torch.device("cpu"))(
        given, torch.tensor([said], dtype=torch.long).view(1, -1)
    )
    return {n for n in range(left.shape[1]) if left[0, n] > -torch.inf}


def text_first():
    """Logits where a token of text is likelier than all times together."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9.0
    return logits


TEXT = set(range(END)) - {3}
TIMES = set(range(TIME, VOCAB))


def test_without_timestamps_none_is_generated():
    assert allowed([], timestamps=False) == (TEXT | {START}) - {4}
    assert allowed([5], timestamps=False) == TEXT | {END, START}


def test_it_starts_with_an_early_timestamp():
    assert allowed([]) == set(range(TIME, TIME + 6))


def test_text_follows_the_first_timestamp():
    assert allowed([TIME]) == TEXT | {END, START}


def test_text_is_followed_by_text_or_a_later_timestamp():
    assert allowed([TIME + 2, 5], text_first()) == TEXT | {END, START} | set(range(TIME + 3, VOCAB))


def test_a_closing_timestamp_is_followed_by_one_not_earlier_or_the_end():
    assert allowed([TIME, 5, TIME + 4]) == set(range(TIME + 4, VOCAB))
    sure = torch.zeros(1, VOCAB)
    sure[0, END] = 9.0
    assert allowed([TIME, 5, TIME + 4], sure) == {END, START} | set(range(TIME + 4, VOCAB))


def test_two_timestamps_are_followed_by_text():
    assert allowed([TIME, 5, TIME + 4, TIME + 6], text_first()) == TEXT | {END, START}


def test_timestamps_win_if_their_sum_exceeds_any_text_token():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 2.5  # below log(16 times)
    assert allowed([TIME, 6], logits) == set(range(TIME + 1, VOCAB))
    logits[0, 5] = 3.0
    assert 5 in allowed([TIME, 6], logits)


def test_rows_are_independent():
    dice = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=dice)
    said = torch.tensor([[TIME, 5, 6], [TIME, 5, TIME + 3], [TIME + 1, 5, 5], [TIME, TIME + 2, 7]])
    rules = TimestampRules(SPEECH, True, torch.device("cpu"))
    together = rules(logits, said)
    for n in range(4):
        torch.testing.assert_close(together[n : n + 1], rules(logits[n : n + 1], said[n : n + 1]))


def test_a_multilingual_vocabulary_has_tasks():
    with pytest.raises(ValueError, match="languages and tasks"):
        Speech(start=1, end=0, no_timestamps=2, languages={"en": 3})
