"""The shipped RETRO preset, narrowed, against Borgeaud et al. 2022, 2.4 and algorithm 1, written out with loops.

One text, no batch, no state. Relative positions of the paper have a test of their own; here they are sinusoids in the
embedding, or rotary as in the public code (lucidrains/RETRO-pytorch, retro_pytorch.py), whose options are tried too. Of
that code one thing is not followed: it shifts the angles of the queries of a chunk together with the queries, so that
all but one are not rotated; here they have the distances that the paper defines (appendix B.1.2). Chunks, attending
chunks and neighbours are counted from 1, as in the paper.
"""

import pytest
import torch

from allyouneed.config import override, parse, preset_tree, tree_of
from allyouneed.nn.batch import Batch, Neighbours, Rows
from allyouneed.nn.models.base import Model
from any_part import build
from parity import difference

WIDTH, HEADS, HEAD, HIDDEN, VOCAB, M, K = 12, 3, 4, 14, 11, 4, 2
R = 2 * M
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
INNER = 8  # width of the encoder and of token vectors, where it is another one
# of the model, and whether all attentions have rotary positions
OPTIONS = {
    "before the norm": ({"querying": "hidden"}, False),
    "text positions": ({"neighbour_positions": False}, False),
    "rotary in both attentions": ({}, True),
    "encoder width": ({"encoder_width": INNER, "querying": "hidden"}, False),
    "RETRO-pytorch": ({"encoder_width": INNER, "querying": "embedding", "neighbour_positions": False}, True),
}


def narrowed(null=False, options=None, rotary=False):
    tree = tree_of(parse(Model, preset_tree("retro")))
    tree |= {"vocab": VOCAB, "width": WIDTH, "embed": tree["embed"] | {"positions": {"kind": "sinusoidal"}}}
    for side in ("encoder", "decoder"):
        for layer in tree[side]:
            layer["repeat"] = 1
            layer["channel"]["hidden"] = HIDDEN
            for slot in ("mixer", "cross"):
                if layer[slot] is not None:
                    layer[slot] |= {"heads": HEADS, "head_width": HEAD}
            for slot in ("mixer", "cross"):
                if layer[slot] is not None:
                    layer[slot]["positions"] = {"kind": "rotary" if rotary else "none"}
            if side == "decoder" and layer["cross"] is not None:
                layer["cross"] |= {"chunk": M, "null": null}
    if (inner := (options or {}).get("encoder_width")) is not None:
        tree["embed"] |= {"inner": inner, "tied": False}
    return parse(Model, override(tree | (options or {}), []))


def rms(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def attend(q, keys, values, out):
    """One query (width of all heads) over some keys and values: softmax head by head."""
    heads = []
    for h in range(HEADS):
        part = slice(h * HEAD, (h + 1) * HEAD)
        scores = torch.stack([q[part] @ key[part] / HEAD**0.5 for key in keys])
        heads.append(sum(weight * value[part] for weight, value in zip(scores.softmax(0), values, strict=True)))
    return out.weight @ torch.cat(heads)


def rotated(module, x, positions):
    """Each head's features i and i + HEAD/2 rotated by position · 10000^(−2i/HEAD), if this attention has positions."""
    if not hasattr(module.relative, "frequencies"):
        return x
    rows = []
    for row, position in zip(x, positions, strict=True):
        heads = []
        for a, b in ((part[: HEAD // 2], part[HEAD // 2 :]) for part in row.split(HEAD)):
            angle = position * 10000.0 ** (-torch.arange(HEAD // 2, dtype=torch.float64) * 2 / HEAD)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            heads += [a * cos - b * sin, b * cos + a * sin]
        rows.append(torch.cat(heads))
    return torch.stack(rows) if rows else x


def self_attention(module, x, causal):
    q, k, v = (x @ module.qkv.weight.T).split(HEADS * HEAD, -1)
    q, k = rotated(module, q, range(len(x))), rotated(module, k, range(len(x)))
    ends = [i + 1 if causal else len(x) for i in range(len(x))]
    return torch.stack([attend(q[i], k[:end], v[:end], module.out) for i, end in enumerate(ends)])


def ffw(module, x):
    return torch.nn.functional.gelu(x @ module.up.weight.T) @ module.down.weight.T


def emb(model, tokens, placed=True):
    """Vectors of the width of the encoder."""
    vectors = model.embed.tokens.weight[tokens]
    if not placed:
        return vectors
    return vectors + model.embed.positions(torch.arange(len(tokens))[None])[0].to(vectors.dtype)


def project(module, x):
    """`to_decoder_model_dim`, `encoder_output_to_decoder_dim` of the public code; none if the widths are equal."""
    return x if module is None else x @ module.weight.T + module.bias


def cross_attention(module, x, seen):
    keys, values = (seen @ module.kv.weight.T).chunk(2, -1)
    keys = rotated(module, keys, range(len(seen)))
    queries = rotated(module, x @ module.q.weight.T, range(len(x)))
    return torch.stack([attend(query, keys, values, module.out) for query in queries])


def encoder(model, tokens, h):
    """ENCODER(Ret(C_u)^j, H_u): bidirectional, each neighbour separately, over the querying chunk (P_enc = {1})."""
    e = emb(model, tokens, model.config.neighbour_positions)
    for p, block in enumerate(model.encoder.blocks, start=1):
        norms, parts = list(block.wiring.norms), block.sublayers
        e = e + self_attention(parts["mixer"], rms(e, norms.pop(0).weight), causal=False)
        assert ("cross" in parts) == (p == 1)
        if p == 1:
            e = e + cross_attention(parts["cross"], rms(e, norms.pop(0).weight), h)
        e = e + ffw(parts["channel"], rms(e, norms.pop(0).weight))
    return project(model.widen, rms(e, model.encoder.end.weight))


def cca(module, h, encoded):
    """CCA(H, E): H+_u = (h_{um+i−1}) for i in 1 … m looks at E_u; all other tokens get nothing."""
    found = torch.zeros_like(h)
    for u, neighbours in encoded.items():
        keys, values = (torch.cat([h[:0], *neighbours]) @ module.kv.weight.T).chunk(2, -1)
        # a neighbour begins where its chunk begins
        keys = rotated(module, keys, [(u - 1) * M + i for one in neighbours for i in range(len(one))])
        if module.null is not None:  # RETRO-pytorch, `null_kv`: one more key and value, which no mask hides
            keys, values = (
                torch.cat([null.reshape(1, -1), rest]) for null, rest in zip(module.null, (keys, values), strict=True)
            )
        for i in range(1, M + 1):
            place = u * M + i - 1  # counted from 1
            if place <= len(h):
                row = torch.zeros_like(h)
                row[place - 1] = 1.0
                query = rotated(module, (module.q.weight @ h[place - 1])[None], [place - 1])[0]
                found = found + row * attend(query, keys, values, module.out)
    return found


def oracle(model, tokens, neighbours):
    """Algorithm 1. `neighbours`: chunk, from 1 -> its neighbours' tokens."""
    encoded = None
    h = project(model.embed.widen, emb(model, tokens))
    for block in model.decoder.blocks:
        norms, parts = list(block.wiring.norms), block.sublayers
        h = h + self_attention(parts["mixer"], rms(h, norms.pop(0).weight), causal=True)
        if "cross" in parts:
            read = rms(h, norms.pop(0).weight)  # as every attention reads it: normalised
            if encoded is None:  # p = min(P)
                seen = {"normed": read, "hidden": h, "embedding": emb(model, tokens)}[model.config.querying]
                chunks = {u: project(model.narrow, seen[(u - 1) * M : u * M]) for u in neighbours}
                encoded = {
                    u: [encoder(model, one, chunks[u]) for one in found]
                    for u, found in neighbours.items()
                    if found or parts["cross"].null is not None
                }
            h = h + cca(parts["cross"], read, encoded)
        h = h + ffw(parts["channel"], rms(h, norms.pop(0).weight))
    return rms(h, model.decoder.end.weight) @ model.head.weight.T


def drawn(time, seed):
    """A text; for each full chunk up to K neighbours of up to R tokens, for some none."""
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (time,), generator=dice)
    found = []
    for u in range(time // M):
        sizes = torch.randint(1, R + 1, (K - u % 2,), generator=dice).tolist() if u % 5 != 3 else []
        found.append([torch.randint(0, VOCAB, (size,), generator=dice) for size in sizes])
    return tokens, found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("time", [3, 4, 11, 33])
def test_logits_and_gradients_are_those_of_the_paper(time, dtype, record_difference):
    compared(time, dtype, record_difference, narrowed(), "oracle from the paper")


@pytest.mark.parametrize("time", [11, 33])
def test_a_null_key_and_value(time, record_difference):
    compared(time, torch.float64, record_difference, narrowed(null=True), "oracle with RETRO-pytorch's null_kv")


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_public_code(option, record_difference):
    options, rotary = OPTIONS[option]
    config = narrowed(options=options, rotary=rotary)
    compared(11, torch.float64, record_difference, config, "oracle with RETRO-pytorch's options")


def compared(time, dtype, record_difference, config, reference):
    model = build(config).to(dtype)
    tokens, found = drawn(time, time)
    given = Neighbours.of([[[one.tolist() for one in chunk] for chunk in found]], K, R, pad=5)
    ours = model.logits(Batch(Rows(tokens[None]), given))[0]
    expected = oracle(model, tokens, dict(enumerate(found, start=1)))
    parameters = dict(model.named_parameters())
    own, theirs = (
        torch.autograd.grad(logits.log_softmax(-1)[:, 3].sum(), list(parameters.values()), allow_unused=True)
        for logits in (ours, expected)
    )
    outputs, gradients = difference(ours, expected), 0.0
    for name, one, other in zip(parameters, own, theirs, strict=True):
        if other is None:  # a text that is no chunk long retrieves nothing
            assert one is None or not one.any(), name
            continue
        gradients = max(gradients, difference(one, other))
    record_difference("RETRO", reference, outputs, gradients)
    assert outputs < TOLERANCE[dtype] and gradients < TOLERANCE[dtype]
