"""Reformer of transformers: the whole model where it does not hash, its hashing, and its chunks.

With one chunk theirs is shared-QK attention without hashing (`buckets: 1` here). In chunks theirs has no equal-bucket
test, and its first chunk looks back at the last one: those queries are left out. With several rounds it counts a key
once for every round in which it is met, the paper once; so one round is compared.
"""

import pytest
import torch
from transformers import ReformerConfig, ReformerModelWithLMHead
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

import decoders
import parity
from allyouneed.config import parse, preset_tree
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.load import load
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.mixers.attention.lsh import LSH
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.lsh import chunked_lsh_attention

REFERENCE = "transformers ReformerModelWithLMHead"
ROWS, COLUMNS, CHUNK = 4, 6, 8
OFF = ("hidden_dropout_prob", "local_attention_probs_dropout_prob", "lsh_attention_probs_dropout_prob")
SIZES = {
    "attention_head_size": 5,
    "attn_layers": ["local", "local", "lsh", "local"],
    "axial_pos_shape": (ROWS, COLUMNS),
    "axial_pos_embds_dim": (7, 9),
    "feed_forward_size": 21,
    "hidden_size": 16,
    "is_decoder": True,
    "local_attn_chunk_length": CHUNK,
    "lsh_attn_chunk_length": ROWS * COLUMNS,
    "max_position_embeddings": ROWS * COLUMNS,
    "num_attention_heads": 3,
    "num_hashes": 1,
    "vocab_size": 13,
}


CASES = {
    "windows and a search": {},
    "searches only, plain positions, biased by nothing": dict(
        attn_layers=["lsh", "lsh"], axial_pos_embds=False, attention_head_size=8, num_attention_heads=2
    ),
    "windows only, no chunk back, another activation": dict(
        attn_layers=["local"], local_attn_chunk_length=3, local_num_chunks_before=0, hidden_act="gelu"
    ),
    "hashes what is longer than a chunk": dict(
        lsh_attn_chunk_length=16, num_buckets=4, num_hashes=2, hash_seed=5, local_attn_chunk_length=4
    ),
    "as many buckets as suit a text": dict(lsh_attn_chunk_length=16, local_attn_chunk_length=4),
}


def theirs(name):
    said = {"use_cache": False, "pad_token_id": 0, "eos_token_id": 2} | dict.fromkeys(OFF, 0.0)
    return ReformerModelWithLMHead(ReformerConfig(**SIZES | CASES[name] | said))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_and_steps(name, tmp_path, record_difference):
    """Their model does not hash these texts; it has no gradients where it does not train."""
    model = theirs(name).eval()
    parity.randomise(model)
    ours, rows = parity.ours(model, tmp_path), Rows.of([[1, 5, 7, 9, 3, 2, 11, 6, 12, 4, 8], [4, 4, 8], [12]])
    inside = decoders.real(rows)
    expected = model(input_ids=rows.tokens, attention_mask=inside.long()).logits[inside]
    found = [ours.logits(Batch(rows))[inside], decoders.stepwise(ours, rows)[inside]]
    outputs = max(parity.difference(each, expected) for each in found)
    record_difference("Reformer", REFERENCE, outputs)
    assert outputs < parity.TOLERANCE


@pytest.mark.parametrize("name", list(CASES)[:3])
@pytest.mark.parametrize("prompt", [[1, 5, 7, 9, 3], [9, 6, 2]])
def test_greedy_continuations(name, prompt, tmp_path):
    """One by one: theirs takes padding for text."""
    decoders.continues_alike(theirs(name), tmp_path, [prompt])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"is_decoder": False}, "is_decoder: False"),
        ({"lsh_attn_chunk_length": 8, "num_buckets": 4, "lsh_num_chunks_before": 2}, "lsh_num_chunks_before: 2"),
        ({"local_num_chunks_after": 1}, "local_num_chunks_after: 1"),
        ({"local_num_chunks_before": 2}, "local_num_chunks_before: 2"),
        ({"attn_layers": ["global"]}, "attn_layers: 'global'"),
        ({"max_position_embeddings": 20}, "max_position_embeddings: 20"),
        ({"new_trick": 1}, "new_trick"),
    ],
)
def test_unsupported_settings_are_refused_by_name(said, told):
    with pytest.raises(UserError, match=told):
        FAMILIES["reformer"].tree(ReformerConfig(**SIZES).to_dict() | said)


@pytest.mark.parametrize("name", CASES)
def test_loading_says_that_the_hashing_is_ours(name, tmp_path):
    theirs(name).save_pretrained(tmp_path)
    notes = [note for note in load(tmp_path).notes if "hashed" in note]
    assert len(notes) == ("lsh_attn_chunk_length" in CASES[name])
    assert all("more than 16 tokens" in note for note in notes)


def test_numbers_of_buckets():
    config = ReformerConfig(**SIZES | CASES["as many buckets as suit a text"]).to_dict()
    said = [{}, {"num_buckets": 6}, {"num_buckets": [2, 4]}]
    trees = [FAMILIES["reformer"].tree(config | keys)["decoder"][1]["mixer"] for keys in said]
    assert [mixer["buckets"] for mixer in trees] == [2, 6, 8] and {mixer["whole"] for mixer in trees} == {16}


def small(node):
    """The shipped preset with the reference's sizes, without hashing."""
    found = dict(node) | {"vocab": 13, "width": 16, "dropout": 0.0}
    found["embed"] = node["embed"] | {"positions": {"kind": "learned-2d", "rows": ROWS, "columns": COLUMNS}}
    found["embed"]["positions"]["row_width"] = 7
    layers = []
    for layer in (node["decoder"][0], node["decoder"][0], node["decoder"][1], node["decoder"][2]):
        mixer = layer["mixer"] | {"heads": 3, "head_width": 5, "dropout": 0.0}
        mixer |= (
            {"pattern": f"causal & block-window({CHUNK}, 2)"} if "pattern" in mixer else {"buckets": 1, "chunk": None}
        )
        channel = layer["channel"] | {"hidden": 21, "dropout": 0.0}
        layers.append(layer | {"repeat": 1, "mixer": mixer, "channel": channel})
    return found | {"decoder": layers}


def moved(named, model):
    """Their weights (or their gradients) by our names."""
    embeddings = "reformer.embeddings."
    found = {
        "embed.tokens.weight": named[f"{embeddings}word_embeddings.weight"],
        "embed.positions.rows.weight": named[f"{embeddings}position_embeddings.weights.0"][:, 0],
        "embed.positions.columns.weight": named[f"{embeddings}position_embeddings.weights.1"][0],
        "decoder.end.norm.weight": named["reformer.encoder.layer_norm.weight"],
        "decoder.end.norm.bias": named["reformer.encoder.layer_norm.bias"],
        "head.weight": named["lm_head.decoder.weight"],
        "head.bias": torch.zeros_like(named["lm_head.bias"]),  # theirs has one and never adds it
    }
    for number in range(len(model.decoder.blocks)):
        theirs, block = f"reformer.encoder.layers.{number}.", f"decoder.blocks.{number}."
        mixer, its = f"{block}sublayers.mixer.", f"{theirs}attention.self_attention."
        if f"{its}query_key.weight" in named:
            found[f"{mixer}qk.weight"], found[f"{mixer}v.weight"] = (
                named[f"{its}{name}.weight"] for name in ("query_key", "value")
            )
        else:
            three = [named[f"{its}{name}.weight"] for name in ("query", "key", "value")]
            found[f"{mixer}qkv.weight"] = torch.cat(three)
        found[f"{mixer}out.weight"] = named[f"{theirs}attention.output.dense.weight"]
        for kind in ("weight", "bias"):
            found[f"{block}wiring.norms.0.{kind}"] = named[f"{theirs}attention.layer_norm.{kind}"]
            found[f"{block}wiring.norms.1.{kind}"] = named[f"{theirs}feed_forward.layer_norm.{kind}"]
            found[f"{block}sublayers.channel.up.{kind}"] = named[f"{theirs}feed_forward.dense.dense.{kind}"]
            found[f"{block}sublayers.channel.down.{kind}"] = named[f"{theirs}feed_forward.output.dense.{kind}"]
    return found


@pytest.fixture(scope="module")
def both():
    their = ReformerModelWithLMHead(ReformerConfig(**SIZES, **dict.fromkeys(OFF, 0.0))).train()
    parity.randomise(their)
    tree = parse(Model, preset_tree("reformer"))
    model = parse(Model, small(tree.model_dump(mode="json"))).build().train()
    model.load_state_dict(moved(dict(their.named_parameters()), model))
    return model, their


def test_outputs_and_gradients(both, record_difference):
    """In training mode, where theirs too goes back instead of keeping."""
    model, their = both
    tokens = torch.randint(0, 13, (2, ROWS * COLUMNS), generator=torch.Generator().manual_seed(1))
    found, expected = model.logits(Batch(Rows(tokens))), their(input_ids=tokens).logits
    outputs = parity.difference(found, expected)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in their.named_parameters()}
    wanted, parameters = moved(named, model), dict(model.named_parameters())
    assert set(wanted) == set(parameters)
    gradients = max(parity.difference(p.grad, wanted[name]) for name, p in parameters.items() if name != "head.bias")
    record_difference("Reformer", REFERENCE, outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.fixture
def hashing():
    """A layer of theirs that hashes, one of ours with the same weights, and what both are given."""
    config = ReformerConfig(
        **SIZES | {"lsh_attn_chunk_length": CHUNK, "num_buckets": 6, "hash_seed": 3, "num_attention_heads": 2},
        **dict.fromkeys(OFF, 0.0),
    )
    theirs = LSHSelfAttention(config, layer_idx=0).eval()
    parity.randomise(theirs)
    layer = LSH(heads=2, head_width=5, buckets=6, rounds=1, seed=3).build(Common(width=16)).eval()
    layer.qk.load_state_dict(theirs.query_key.state_dict())
    layer.v.load_state_dict(theirs.value.state_dict())
    x = torch.randn(3, 5 * CHUNK, 16, generator=torch.Generator().manual_seed(2))
    return theirs, layer, x


def heads(y):
    return y.unflatten(-1, (2, 5)).transpose(1, 2)


@pytest.mark.parametrize("rounds", [1, 4])
def test_hash_buckets_match(hashing, rounds):
    theirs, _, x = hashing
    layer = LSH(heads=2, head_width=5, buckets=6, rounds=rounds, seed=3).build(Common(width=16))
    q = heads(theirs.query_key(x))
    expected = theirs._hash_vectors(q, rounds, None).unflatten(-1, (rounds, -1)) % 6  # (batch, heads, rounds, time)
    assert torch.equal(layer.hash_tokens(q.detach()).transpose(2, 3).long(), expected)
    assert len(expected.unique()) == 6


def test_chunks_of_sorted_tokens(hashing, record_difference):
    theirs, layer, x = hashing
    q, v = heads(layer.qk(x)), heads(layer.v(x))
    k = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * 5**-0.5
    ids = layer.hash_tokens(q)
    found = chunked_lsh_attention(q, k, v, ids, CHUNK, 1, causal=True, limited=True, same_bucket=False)
    expected = heads(theirs(x).hidden_states)
    rank = ids[..., 0].argsort(dim=-1, stable=True).argsort(-1)
    later = (rank >= CHUNK)[..., None]  # queries of all chunks but the first
    outputs = parity.difference(found * later, expected * later)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected) * later
    own = torch.autograd.grad((found * weight).sum(), [layer.qk.weight, layer.v.weight])
    their = torch.autograd.grad((expected * weight).sum(), [theirs.query_key.weight, theirs.value.weight])
    gradients = max(parity.difference(a, b) for a, b in zip(own, their, strict=True))
    record_difference("Reformer", "transformers LSHSelfAttention, chunks", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
