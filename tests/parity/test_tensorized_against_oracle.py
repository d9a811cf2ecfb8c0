"""Multi-linear attention against Ma et al. 2019, 3.1-3.2, written out: every block's tensor as a sum of outer products
of three vectors, the mean of the blocks, its slices concatenated and projected. The pattern, which the authors' code
lacks, removes the tokens that a query may not see."""

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.base import Model
from attention_layers import TOLERANCE, agreement, build_mixer, randomise_module
from shrink import shrink

LENGTH, WIDTH, RANK, BLOCKS = 7, 12, 5, 3


def by_the_paper(mixer, x, causal):
    q, k, v = mixer.qkv(x).chunk(3, -1)
    blocks = [
        sum(g[r] * torch.einsum("i,j,k->ijk", q[:, r], k[:, r], v[:, r]) for r in range(RANK)) for g in mixer.cores
    ]
    tensor, n = sum(blocks) / BLOCKS, len(x)
    full = torch.zeros(n, LENGTH, LENGTH)
    for i in range(n):
        seen = i + 1 if causal else n
        full[i, :seen, :seen] = tensor[i, :seen, :seen]
    return full.flatten(1) @ mixer.out.weight.T


@pytest.mark.parametrize("pattern", ["full", "causal"])
@pytest.mark.parametrize("length", [LENGTH, 4])
def test_block_term_attention(pattern, length, record_difference):
    keys = {"kind": "tensorized", "rank": RANK, "blocks": BLOCKS, "length": LENGTH, "pattern": pattern}
    mixer = randomise_module(build_mixer(WIDTH, keys), size=0.5)
    x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(0))
    found = mixer(x[None], Context(TokenLayout(torch.arange(length)[None], start=0)))[0]
    differences = agreement(found, by_the_paper(mixer, x, pattern == "causal"), list(mixer.parameters()))
    record_difference("Tensorized Transformer", "equations written out", *differences)
    assert max(differences) < TOLERANCE


def test_other_linear_maps_give_the_same():
    """A quantized output map has no slices of weights: the tensor is padded instead."""
    mixer = randomise_module(build_mixer(WIDTH, {"kind": "tensorized", "length": LENGTH}))
    x, context = torch.randn(2, 4, WIDTH), Context(TokenLayout(torch.arange(4)[None], start=0))
    expected = mixer(x, context)
    mixer.out = torch.nn.Sequential(mixer.out)
    torch.testing.assert_close(mixer(x, context), expected)


def test_a_longer_sentence_is_refused():
    model = shrink(parse(Model, preset_tree("tensorized-transformer"))).build()
    tokens = torch.ones(1, model.config.decoder[0].mixer.length + 1, dtype=torch.long)
    with pytest.raises(UserError, match="exceeds tensorized attention's length"):
        model(Batch(Rows(tokens)))
