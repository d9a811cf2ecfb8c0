"""Rotary positions against Llama, GPT-NeoX, GPT-J and RoFormer of transformers, and xPos against its paper."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.positions.relative import Heads, Relative
from attention_layers import TOLERANCE, build_mixer, differences, hidden, max_difference, randomise_module, rows

LENGTHS = [13, 7, 1]
LONG = 30  # length the models say they were trained on; sentences of the tests are longer where scaling is tried

# what transformers calls it -> what we call it
SCALINGS = {
    "default": ({"rope_type": "default"}, "none"),
    "linear": ({"rope_type": "linear", "factor": 2.5}, {"kind": "linear", "factor": 2.5}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LONG},
        {"kind": "yarn", "factor": 4.0, "original": LONG},
    ),
    "yarn, all said": (
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": LONG,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "attention_factor": 1.3,
            "truncate": False,
        },
        {
            "kind": "yarn",
            "factor": 8.0,
            "original": LONG,
            "fast": 4.0,
            "slow": 0.5,
            "attention_factor": 1.3,
            "whole_planes": False,
        },
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": LONG,
        },
        {"kind": "llama3", "factor": 8.0, "original": LONG},
    ),
}


def llama(width=24, heads=4, kv_heads=2, head_width=None, bias=True, base=10000.0, **rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_width or width // heads,
        attention_bias=bias,
        max_position_embeddings=LONG,
        rope_parameters={"rope_theta": base} | (rope or {"rope_type": "default"}),
    )
    config._attn_implementation = "eager"
    return randomise_module(LlamaAttention(config, 0), seed=0), LlamaRotaryEmbedding(config)


def llama_weights(get):
    found = {}
    for kind in ("weight", "bias"):
        found[f"qkv.{kind}"] = torch.cat([get(f"{part}_proj.{kind}") for part in "qkv"])
        found[f"out.{kind}"] = get(f"o_proj.{kind}")
    return found


@pytest.mark.parametrize("base", [10000.0, 500.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_llama_attention_layer(name, base, record_difference):
    theirs_scaling, ours_scaling = SCALINGS[name]
    theirs, tables = llama(base=base, head_width=12, **theirs_scaling)
    ours = build_mixer(
        24,
        {
            "kind": "attention",
            "heads": 4,
            "kv_heads": 2,
            "head_width": 12,
            "pattern": "causal",
            "positions": {"kind": "rotary", "base": base, "scaling": ours_scaling},
        },
    )
    lengths = [41, 33, 1]
    _, layout, real = rows(lengths, 24)

    def run(x):
        return theirs(x, tables(x, layout.positions), hidden(real, causal=True))[0]

    found = differences(ours, theirs, llama_weights, run, lengths, 24)
    record_difference("RoPE", "transformers LlamaAttention", *found)
    assert max(found) < TOLERANCE


def turned(keys, q, k, v, positions):
    heads = Heads(q.shape[1], k.shape[1], q.shape[-1], causal=True)
    part = Relative.choose({"kind": "rotary"} | keys)
    assert not part.problems(heads, Common(width=8))
    return part.build(heads, Common(width=8)).apply_positions(q, k, v, Context(TokenLayout(positions)))


def vectors(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SCALINGS)
def test_llamas_queries_and_keys_are_rotated_equally(name):
    """Positions of any size and order. Theirs are angles in single precision, so far places may differ by their
    error."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    theirs_scaling, ours_scaling = SCALINGS[name]
    _, tables = llama(head_width=14, **theirs_scaling)
    q, k = vectors(2, 4, 5, 14), vectors(2, 2, 5, 14, seed=4)
    positions = torch.tensor([[0, 1, 5, 3, 2], [40, 2, 77, 3, 0]])
    expected = apply_rotary_pos_emb(q, k, *tables(q, positions))
    found = turned({"scaling": ours_scaling}, q, k, k, positions)
    for ours, theirs in zip(found[:2], expected, strict=True):
        difference = (ours - theirs).abs().max()
        assert difference < TOLERANCE
    assert torch.equal(found[2], k)


@pytest.mark.parametrize("length", [LONG + 1, 45, 100])
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.5])
def test_dynamic_scaling_is_ntk_for_one_length(length, factor):
    """Theirs depends on the longest sentence so far, ours is fixed: equal for the length it is made for."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    _, tables = llama(head_width=14, rope_type="dynamic", factor=factor)
    q, positions = vectors(1, 4, length, 14), torch.arange(length)[None]
    expected, _ = apply_rotary_pos_emb(q, q, *tables(q, positions))
    scaling = {"kind": "ntk", "factor": factor * length / LONG - (factor - 1)}
    found, _, _ = turned({"scaling": scaling}, q, q, q, positions)
    difference = (found - expected).abs().max()
    assert difference < TOLERANCE


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_a_gpt_neox_attention_layer(fraction, record_difference):
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding

    width, heads = 24, 3
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}
    config = GPTNeoXConfig(hidden_size=width, num_attention_heads=heads, rope_parameters=rope)
    config._attn_implementation = "eager"
    theirs, tables = randomise_module(GPTNeoXAttention(config, 0), seed=0), GPTNeoXRotaryEmbedding(config)
    positions = {"kind": "rotary", "fraction": fraction}
    ours = build_mixer(width, {"kind": "attention", "heads": heads, "pattern": "causal", "positions": positions})
    _, layout, real = rows(LENGTHS, width)

    def convert(get):
        """Theirs has q, k and v of a head side by side."""
        found = {}
        for kind in ("weight", "bias"):
            all_heads = get(f"query_key_value.{kind}").unflatten(0, (heads, 3, width // heads))
            found[f"qkv.{kind}"] = all_heads.transpose(0, 1).flatten(0, 2)
            found[f"out.{kind}"] = get(f"dense.{kind}")
        return found

    def run(x):
        return theirs(x, hidden(real, causal=True), position_embeddings=tables(x, layout.positions))[0]

    found = differences(ours, theirs, convert, run, LENGTHS, width)
    record_difference("RoPE", "transformers GPTNeoXAttention", *found)
    assert max(found) < TOLERANCE


def test_a_gptj_attention_layer(record_difference):
    """Interleaved and partial."""
    from transformers import GPTJConfig
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    width, heads = 24, 3
    config = GPTJConfig(n_embd=width, n_head=heads, rotary_dim=4, n_positions=64, attn_pdrop=0, resid_pdrop=0)
    theirs = randomise_module(GPTJAttention(config, 0), seed=0)
    positions = {"kind": "rotary", "fraction": 0.5, "order": "interleaved"}
    keys = {"kind": "attention", "heads": heads, "pattern": "causal", "positions": positions, "bias": False}
    _, layout, real = rows(LENGTHS, width)

    def convert(get):
        return {
            "qkv.weight": torch.cat([get(f"{part}_proj.weight") for part in "qkv"]),
            "out.weight": get("out_proj.weight"),
        }

    def run(x):
        mask = hidden(real, causal=True)
        return theirs(x, attention_mask=mask, position_ids=layout.positions.expand(len(x), -1))[0]

    found = differences(build_mixer(width, keys), theirs, convert, run, LENGTHS, width)
    record_difference("RoPE", "transformers GPTJAttention", *found)
    assert max(found) < TOLERANCE


@pytest.mark.parametrize("values", [False, True])
def test_a_roformer_attention_layer(values, record_difference):
    from transformers import RoFormerConfig
    from transformers.models.roformer.modeling_roformer import RoFormerAttention, RoFormerSinusoidalPositionalEmbedding

    width, heads = 24, 3
    config = RoFormerConfig(
        hidden_size=width,
        num_attention_heads=heads,
        rotary_value=values,
        attention_probs_dropout_prob=0,
        hidden_dropout_prob=0,
    )
    tables = RoFormerSinusoidalPositionalEmbedding(64, width // heads)
    tables.weight.data = tables.create_weight()
    theirs = randomise_module(RoFormerAttention(config), seed=0)
    theirs.output.LayerNorm = torch.nn.Identity()
    positions = {"kind": "rotary", "order": "interleaved", "values": values}
    ours = build_mixer(width, {"kind": "attention", "heads": heads, "positions": positions})
    _, _, real = rows(LENGTHS, width)

    def convert(get):
        found = {}
        for kind in ("weight", "bias"):
            found[f"qkv.{kind}"] = torch.cat([get(f"self.{part}.{kind}") for part in ("query", "key", "value")])
            found[f"out.{kind}"] = get(f"output.dense.{kind}")
        return found

    def run(x):
        sinusoids = tables(x.shape[:-1], 0)[None, None]
        return theirs(x, hidden(real, causal=False), sinusoidal_pos=sinusoids)[0] - x  # without the residual

    found = differences(ours, theirs, convert, run, LENGTHS, width)
    record_difference("RoPE", "transformers RoFormerAttention", *found)
    assert max(found) < TOLERANCE


def by_the_xpos_paper(q, k, base, scale_base):
    """Sun et al. 2022, algorithm 1 and 3.2, plane by plane: f_q = A e^{iθn} ζ^n, f_k = B e^{iθm} ζ^-m, n and m counted
    in units of `scale_base`; the score is the real part of f_q times the conjugate of f_k, summed over the planes."""
    (time, width) = q.shape
    scores = torch.zeros(time, time, dtype=torch.float64)
    for n in range(time):
        for m in range(n + 1):
            for plane in range(width // 2):
                angle = (n - m) / base ** (2 * plane / width)
                zeta = (plane / (width / 2) + 0.4) / (1 + 0.4)
                a, b = (complex(x[2 * plane], x[2 * plane + 1]) for x in (q[n], k[m]))
                turn = complex(math.cos(angle), math.sin(angle))
                scores[n, m] += (a * b.conjugate() * turn).real * zeta ** ((n - m) / scale_base)
    return scores


@pytest.mark.parametrize("scale_base", [512.0, 3.0])
def test_xpos_is_its_papers_formula(scale_base, record_difference):
    q, k = vectors(9, 6).double(), vectors(9, 6, seed=8).double()
    keys = {"xpos": scale_base, "order": "interleaved"}
    found_q, found_k, _ = turned(keys, q[None, None], k[None, None], k[None, None], torch.arange(9)[None])
    found = (found_q @ found_k.transpose(-1, -2))[0, 0].tril()
    difference = max_difference(found, by_the_xpos_paper(q, k, 10000.0, scale_base))
    record_difference("xPos", "equations written out", difference)
    assert difference < 1e-12


@given(st.integers(0, 10**6), st.integers(0, 2000), st.sampled_from(["halves", "interleaved"]), st.booleans())
def test_scores_depend_on_distance_only(shift, distance, order, scaled):
    """Su et al. 2021, eq. 11. Also a million places away: the angles are made in double precision."""
    q, k = vectors(1, 1, 1, 8), vectors(1, 1, 1, 8, seed=6)
    scaling = {"kind": "yarn", "factor": 4.0, "original": 100} if scaled else "none"

    def score(query, key):
        turned_q, _, _ = turned({"order": order, "scaling": scaling}, q, q, q, torch.tensor([[query]]))
        _, turned_k, _ = turned({"order": order, "scaling": scaling}, k, k, k, torch.tensor([[key]]))
        return float((turned_q * turned_k).sum())

    assert score(distance + shift, shift) == pytest.approx(score(distance, 0), abs=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_does_not_shift_positions(dtype):
    """Frequencies rounded to 8 bits would put token 3000 somewhere else."""
    q, positions = vectors(1, 2, 3, 8), torch.tensor([[5, 500, 3000]])
    expected, _, _ = turned({}, q, q, q, positions)
    found, _, _ = turned({}, q.to(dtype), q.to(dtype), q.to(dtype), positions)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0)
