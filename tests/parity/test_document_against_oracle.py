"""The context encoder and its gated attention (Zhang et al. 2018, 3.2-3.4) against the equations, sentence by sentence.
Order and gate are those of the authors' code: self-attention, context attention, encoder-decoder attention,
feed-forward; λ = σ(W_i H + W_s C) without bias, and a norm after Gating(H)."""

import math

import torch

from allyouneed.config import preset_tree
from allyouneed.nn.batch import Batch, Rows
from any_part import HEADS, WIDTH, build, tree, with_context
from parity import pair_differences

BREAK = 5
# sources with two, one and no sentences before them
SOURCES = [[3, 1, BREAK, 4, 9, 2, BREAK, 6, 7], [8, BREAK, 2, 6, 1], [4, 4, 3]]
TARGETS = [[1, 9, 4], [1, 3, 7, 8, 2], [1, 6]]


def linear(x, part):
    return x @ part.weight.T + (0 if part.bias is None else part.bias)


def normed(x, part):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + part.eps).sqrt() * part.weight + part.bias


def attend(q, k, v, causal=False):
    size, heads = WIDTH // HEADS, []
    for h in (slice(n * size, (n + 1) * size) for n in range(HEADS)):
        scores = q[:, h] @ k[:, h].T / size**0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[:, h])
    return torch.cat(heads, -1)


def self_attention(x, part, causal=False):
    return linear(attend(*linear(x, part.qkv).chunk(3, -1), causal), part.out)


def cross_attention(x, part, memory):
    return linear(attend(linear(x, part.q), *linear(memory, part.kv).chunk(2, -1)), part.out)


def gating(x, part, context):
    """λ H + (1 − λ) C; without context, λ = 1."""
    if not len(context):
        return x
    seen = cross_attention(x, part, context)
    gate = (linear(x, part.gate_input) + linear(seen, part.gate_context)).sigmoid()
    return gate * x + (1 - gate) * seen


def ffn(x, part):
    return linear(linear(x, part.up).relu(), part.down)


def run(stack, x, memory, context, causal):
    """Post-norm blocks: LayerNorm(x + f(x)), and LayerNorm(Gating(x)) for the attention to the context."""
    for block in stack.blocks:
        norms = iter(block.wiring.norms)
        for name, part in block.sublayers.items():
            if name == "mixer":
                x = x + self_attention(x, part, causal)
            elif hasattr(part, "gate_input"):
                x = gating(x, part, context)
            elif name == "cross":
                x = x + cross_attention(x, part, memory)
            else:
                x = x + ffn(x, part)
            x = normed(x, next(norms))
    return x


def embed(model, tokens):
    rows = Rows(torch.tensor([tokens]))
    return model.embed(rows, model.embed.layout(rows))[0]


def oracle(model, source, target):
    cut = max((n + 1 for n, token in enumerate(source) if token == BREAK), default=0)
    context = run(model.context, embed(model, source[:cut]), None, None, False) if cut else ()
    memory = run(model.encoder, embed(model, source[cut:]), None, context, False)
    hidden = run(model.decoder, embed(model, target), memory, context, True)
    return hidden @ model.embed.tokens.weight.T + (0 if model.head.bias is None else model.head.bias)


def test_outputs_and_gradients(record_difference):
    model = build(with_context(tree(), BREAK))
    found = model.logits(Batch(Rows.of(TARGETS), Rows.of(SOURCES, pad=BREAK)))
    pairs = [
        (found[n, : len(target)], oracle(model, source, target))
        for n, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True))
    ]
    outputs, gradients = pair_differences(pairs, list(model.parameters()))
    assert outputs < 1e-9 and gradients < 1e-9
    record_difference("Document Transformer", "oracle from the equations of 3.2-3.4", outputs, gradients)


def test_the_preset_uses_it():
    keys = preset_tree("document-transformer")
    assert keys["layers"]["context"]["cross"] == {"kind": "context-attention", "heads": 8}
    assert len(keys["context"]) == 1  # table 5 of the paper: one layer is best


@torch.no_grad()
def test_packed_and_padded_contexts_stay_with_their_sentences():
    model = build(with_context(tree(), BREAK))
    alone = [
        model.logits(Batch(Rows(torch.tensor([target])), Rows(torch.tensor([source]))))[0]
        for source, target in zip(SOURCES, TARGETS, strict=True)
    ]
    segments = [torch.tensor([[n for n, one in enumerate(side, 1) for _ in one] + [0]]) for side in (TARGETS, SOURCES)]
    tokens = [torch.tensor([[token for one in side for token in one] + [BREAK]]) for side in (TARGETS, SOURCES)]
    packed = model.logits(Batch(*(Rows(t, segments=s) for t, s in zip(tokens, segments, strict=True))))[0, :-1]
    torch.testing.assert_close(packed, torch.cat(alone))
    left = model.logits(Batch(Rows.of(TARGETS), Rows.of(SOURCES, BREAK, side="left")))
    for one, row in zip(alone, left, strict=True):
        torch.testing.assert_close(row[: len(one)], one)
    changed = [[2, *SOURCES[0][1:]]]  # a word of the first of two sentences
    other = model.logits(Batch(Rows(torch.tensor([TARGETS[0]])), Rows(torch.tensor(changed))))[0]
    assert (other - alone[0]).abs().max() > 1e-3


@torch.no_grad()
def test_without_context_it_is_the_plain_model():
    """On a pre-norm wiring, whose norms belong to the sub-layers."""
    plain = tree(wiring="pre-norm")
    model, base = build(with_context(plain, BREAK)), build(plain)
    state, known = {}, model.state_dict()
    for name in base.state_dict():
        stack, _, number, *rest = name.split(".") if ".blocks." in name else ("", "", "0", name)
        if stack == "encoder" and rest[:2] == ["wiring", "norms"]:
            rest[2] = str([0, 2][int(rest[2])])  # its second norm belongs to the context
        elif stack == "decoder":
            first = rest[1] == "mixer" if rest[0] == "sublayers" else rest[2] == "0"
            number = str(2 * int(number) + (not first))
            if rest[0] == "wiring" and not first:
                rest[2] = str(int(rest[2]) - 1)
        state[name] = known[".".join([stack, "blocks", number, *rest])] if stack else known[name]
    base.load_state_dict(state)
    source, target = Rows(torch.tensor([[3, 1, 4]])), Rows(torch.tensor([TARGETS[1]]))
    torch.testing.assert_close(model.logits(Batch(target, source)), base.logits(Batch(target, source)), rtol=0, atol=0)
