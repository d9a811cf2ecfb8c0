"""Shaw's relative positions against wav2vec2-bert of transformers (keys) and against the paper's equations (values)."""

import pytest
import torch

from allyouneed.nn.context import Context
from attention_layers import TOLERANCE, agreement, build_mixer, differences, hidden, randomise_module, rows

LENGTHS = [13, 7, 1]


@pytest.mark.parametrize("distance", [1, 3, 20])
def test_a_wav2vec2_bert_attention_layer(distance, record_difference):
    from transformers import Wav2Vec2BertConfig
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    width, heads = 24, 3
    config = Wav2Vec2BertConfig(
        hidden_size=width,
        num_attention_heads=heads,
        attention_dropout=0,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=distance,
        right_max_position_embeddings=distance,
    )
    config._attn_implementation = "eager"
    theirs = randomise_module(Wav2Vec2BertSelfAttention(config))
    positions = {"kind": "shaw", "distance": distance, "values": False}
    ours = build_mixer(width, {"kind": "attention", "heads": heads, "positions": positions})
    _, _, real = rows(LENGTHS, width)

    def convert(get):
        found = {"relative.keys_table.weight": get("distance_embedding.weight")}
        for kind in ("weight", "bias"):
            found[f"qkv.{kind}"] = torch.cat([get(f"linear_{part}.{kind}") for part in "qkv"])
            found[f"out.{kind}"] = get(f"linear_out.{kind}")
        return found

    def run(x):
        return theirs(x, hidden(real, causal=False))[0]

    found = differences(ours, theirs, convert, run, LENGTHS, width)
    record_difference("Shaw positions", "transformers Wav2Vec2BertSelfAttention", *found)
    assert max(found) < TOLERANCE


def by_the_paper(module, x, length, causal):
    """Eq. 3-5 with loops, for one sentence: z_i = Σ_j α_ij (x_j W^V + a^V_ij), e_ij = x_i W^Q (x_j W^K + a^K_ij)^T /
    √d_z."""
    heads, clip = module.heads, module.relative.distance
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in module.qkv(x).chunk(3, -1))
    a_k = module.relative.keys_table.weight
    a_v = None if module.relative.values_table is None else module.relative.values_table.weight
    out = []
    for i in range(length):
        seen = range(i + 1) if causal else range(length)
        together = []
        for h in range(heads):
            number = [max(-clip, min(clip, j - i)) + clip for j in seen]
            scores = [q[i, h] @ (k[j, h] + a_k[n]) / q.shape[-1] ** 0.5 for j, n in zip(seen, number, strict=True)]
            weights = torch.stack(scores).softmax(0)
            values = [v[j, h] + (0 if a_v is None else a_v[n]) for j, n in zip(seen, number, strict=True)]
            together.append((weights[:, None] * torch.stack(values)).sum(0))
        out.append(torch.cat(together))
    return module.out(torch.stack(out))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("distance", [2, 30])
def test_keys_and_values_are_the_papers_equations(values, causal, distance, record_difference):
    positions = {"kind": "shaw", "distance": distance, "values": values}
    keys = {"kind": "attention", "heads": 3, "positions": positions, "pattern": "causal" if causal else "full"}
    module = randomise_module(build_mixer(12, keys))
    x, layout, _ = rows(LENGTHS, 12)
    parameters = list(module.parameters())
    found = module(x, Context(layout))
    for row, length in enumerate(LENGTHS):
        expected = by_the_paper(module, x[row, :length], length, causal)
        difference = agreement(found[row, :length], expected, parameters)
        record_difference("Shaw positions", "equations written out", *difference)
        assert max(difference) < TOLERANCE
