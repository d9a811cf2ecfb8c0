"""What the tests of decoding share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.folder import Folder
from allyouneed.infer.engine import Engine
from toy_models import BOS, EOS, PAD, VOCAB, Echo, random_model

TEXT = [
    "The quick brown fox jumps over the lazy dog. How are you today? I am fine, thank you very much!",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "你好，世界。今天天气很好！我们去公园散步吧？好的，走吧。",
    "1 2 3 4 5 6 7 8 9 0",
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train(TokenizerConfig(vocab=400), TEXT * 3)


@pytest.fixture(scope="session")
def multilingual() -> Tokenizer:
    return train(TokenizerConfig(vocab=400), TEXT * 3, languages=["zh", "en", "fr"])


@pytest.fixture
def echo() -> Callable[..., Folder]:
    """A model folder whose model says what it hears."""

    def make(tokenizer: Tokenizer, swap: dict[int, int] | None = None) -> Folder:
        model = Echo(tokenizer.size, set(tokenizer.languages.values()), swap)
        return Folder(model, Vocabularies(tokenizer, tokenizer))

    return make


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine(random_model(), BOS, EOS, PAD, forbidden=[PAD, BOS])


@pytest.fixture(scope="session")
def sources() -> list[list[int]]:
    dice = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (23,), generator=dice).tolist()
    return [[*torch.randint(3, VOCAB, (length,), generator=dice).tolist(), EOS] for length in lengths]
