"""A vocabulary of whole values, such as the items of a log: every value is one token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from allyouneed.data.tokenizers.base import BOS, EOS, MAX_VOCAB, PAD, Tokenizer, TokenizerConfig
from allyouneed.data.tokenizers.subwords import MIN_FREQUENCY
from allyouneed.errors import UserError

UNKNOWN = "<unk>"


def train_values(config: TokenizerConfig, values: Iterable[str]) -> Tokenizer:
    """Values that occur at least `min_frequency` times, the most frequent first; all others are `<unk>`, which is
    trained on the rare ones. `vocab` bounds their number if it is set."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    counts = Counter(values)
    if not counts:
        raise UserError("no values to learn a vocabulary from; check the data files")
    least = config.min_frequency or MIN_FREQUENCY
    frequent = sorted((value for value, count in counts.items() if count >= least), key=lambda v: (-counts[v], v))
    specials = list(dict.fromkeys([PAD, BOS, EOS, UNKNOWN, *config.specials]))
    room = (config.vocab if "vocab" in config.model_fields_set else MAX_VOCAB) - len(specials)
    if room < 1:
        raise UserError(f"a vocabulary of {config.vocab} has no room for values; set vocab higher")
    kept = frequent[:room]
    vocab = {value: number for number, value in enumerate([*specials, *kept])}
    inner = Inner(models.WordLevel(vocab, UNKNOWN))  # without a pre-tokenizer: a text is one word
    inner.add_special_tokens(specials)
    notes = [f"{len(kept):,} of {len(counts):,} values are in the vocabulary; the others are unknown"]
    return Tokenizer(inner, notes=notes)
