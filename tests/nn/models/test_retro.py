"""A text with neighbours: nothing leaks, all ways to compute it agree, and searched neighbours equal given ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Neighbours, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.attention.chunked_cross import ChunkBlocks, mask
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.attention.dense import DenseAttention, ScoreMod
from any_part import HEADS, VOCAB, WIDTH, build
from property_tests import examples

M, K = 3, 2
ATTENTION = {"kind": "attention", "heads": HEADS}
CHANNEL = {"kind": "ffn", "hidden": 14}
CROSS = {"kind": "chunked-cross", "heads": HEADS, "chunk": M}
READS = {"mixer": ATTENTION, "channel": CHANNEL}
CONDITIONED = [READS | {"cross": ATTENTION}, READS]  # the encoder's first layer looks at the chunk that asked


def tree(cross=CROSS, **keys):
    plain = {"wiring": "pre-norm", "mixer": ATTENTION | {"pattern": "causal"}, "channel": CHANNEL}
    given = {"kind": "retro", "vocab": VOCAB, "width": WIDTH, "embed": {"positions": "sinusoidal"}, "neighbours": K}
    given["encoder"] = [READS | {"repeat": 2}]
    return given | {"decoder": [plain, plain | {"cross": cross}, plain | {"cross": cross}]} | keys


ROTARY = ATTENTION | {"positions": "rotary", "head_width": 4}
OWN_WIDTH = {"encoder_width": 8, "embed": {"positions": "sinusoidal", "inner": 8, "tied": False}}
OWN_WIDTH |= {"encoder": [READS | {"mixer": ROTARY, "cross": ROTARY}]}
MODELS = {
    "plain": build(tree()),
    "one key head": build(tree(CROSS | {"kv_heads": 1, "bias": False, "qk_norm": "rms"})),
    "conditioned": build(tree(encoder=CONDITIONED)),
    "before the norm": build(tree(CROSS | {"positions": "rotary"}, querying="hidden", **OWN_WIDTH)),
    "embeddings": build(tree(querying="embedding", neighbour_positions=False, **OWN_WIDTH)),
}
SLOW = {"embeddings": [pytest.mark.slow]}
every_model = pytest.mark.parametrize(
    "model", [pytest.param(model, id=name, marks=SLOW.get(name, [])) for name, model in MODELS.items()]
)
text = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=14)


def search(chunks):
    """What is found depends on the chunk alone: up to K neighbours of any length, for some chunks none."""
    found = []
    for chunk in chunks:
        dice = torch.Generator().manual_seed(sum(token * VOCAB**n for n, token in enumerate(chunk)))
        count = int(torch.randint(0, K + 1, (), generator=dice))
        sizes = torch.randint(1, 2 * M + 1, (count,), generator=dice).tolist()
        found.append([torch.randint(0, VOCAB, (size,), generator=dice).tolist() for size in sizes])
    return found


def neighbours(texts, pad=0):
    found = [search([t[u : u + M] for u in range(0, len(t) - M + 1, M)]) for t in texts]
    return Neighbours.of(found, K, 2 * M, pad)


def alone(model, tokens):
    with torch.no_grad():
        return model.logits(Batch(Rows(torch.tensor([tokens])), neighbours([tokens])))[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@every_model
@settings(max_examples=20)
@given(tokens=text, at=st.integers(0, 14), other=text)
def test_later_tokens_and_neighbours_do_not_change_earlier_results(model, tokens, at, other):
    changed = [*tokens[:at], *other]
    close(alone(model, changed)[: min(at, len(tokens))], alone(model, tokens)[:at])


def test_neighbours_attend_to_their_own_chunk_only():
    """Encoded neighbours depend on their own querying chunk only, if the encoder is conditioned."""
    found = Neighbours.of([[[[4, 5]], [[6, 7, 8]], [[9]]]], K, 2 * M)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]])
    for name, sees in (("conditioned", True), ("plain", False)):
        model, memories = MODELS[name], []
        for changed in (tokens, tokens.clone().index_fill_(1, torch.tensor([4]), 9)):  # of the second chunk
            with torch.no_grad():
                given = model.encode_source(found)
                if sees:
                    layout = model.embed.layout(Rows(changed))
                    given = given(model.embed(Rows(changed), layout), Context(layout), None)
            memories.append(given.hidden.unflatten(1, (3, -1)))
        differs = [not torch.equal(*(memory[:, u] for memory in memories)) for u in range(3)]
        assert differs == [False, sees, False]


@every_model
def test_neighbours_are_visible_to_the_attending_chunk_only(model):
    """And, through lower layers, to all later tokens."""
    tokens, first = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1], None
    for u in range(3):
        given = Neighbours.of([[[[4, 5]], [[6, 7, 8]], [[9]]]], K, 2 * M)
        lengths = given.lengths.clone()
        lengths[0, u] = 0
        with torch.no_grad():
            found = [
                model.logits(Batch(Rows(torch.tensor([tokens])), Neighbours(given.tokens, n)))[0]
                for n in (given.lengths, lengths)
            ]
        changed = (found[0] - found[1]).abs().amax(-1) > 1e-6
        first = (u + 1) * M - 1
        assert not changed[:first].any() and changed[first:].all()


@every_model
@settings(max_examples=20)
@given(
    texts=st.lists(text, min_size=1, max_size=4), pad=st.integers(0, VOCAB - 1), side=st.sampled_from(["right", "left"])
)
def test_padding_and_other_rows_do_not_matter(model, texts, pad, side):
    with torch.no_grad():
        found = model.logits(Batch(Rows.of(texts, pad, side), neighbours(texts, pad)))
    for row, tokens in zip(found, texts, strict=True):
        close(row[: len(tokens)] if side == "right" else row[-len(tokens) :], alone(model, tokens))


def step(model, states, chunks):
    with torch.no_grad():
        found = model.head(model.advance(Rows.of(chunks, pad=5), states))
    return [found[row, : len(chunk)] for row, chunk in enumerate(chunks)]


@every_model
@pytest.mark.parametrize("searching", [True, False])
@settings(max_examples=20)
@given(
    texts=st.lists(text, min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
)
def test_decoding_and_chunked_prefill_equal_the_whole_pass(model, searching, texts, cuts):
    with torch.no_grad():
        states = model.start(len(texts), search) if searching else model.start(neighbours(texts))
    seen, found, turn = [0] * len(texts), [[] for _ in texts], 0
    while seen != [len(t) for t in texts]:
        sizes = [cuts[(turn + row) % len(cuts)] for row in range(len(texts))]
        chunks = [t[at : at + size] for t, at, size in zip(texts, seen, sizes, strict=True)]
        turn += 1
        if any(chunks):
            for row, logits in enumerate(step(model, states, chunks)):
                found[row].append(logits)
        seen = [at + len(chunk) for at, chunk in zip(seen, chunks, strict=True)]
    for tokens, logits in zip(texts, found, strict=True):
        close(torch.cat(logits), alone(model, tokens))


@every_model
@examples(10, thorough=40)
@given(
    texts=st.lists(text, min_size=1, max_size=3),
    moves=st.lists(st.tuples(st.sampled_from(["fan", "select", "trim", "cut", "say"]), st.integers(1, 12)), max_size=6),
)
def test_reordered_states_equal_a_fresh_start(model, texts, moves):
    """Beams that write different chunks have different neighbours; what is taken back is searched for anew."""
    states, rows, group = model.start(len(texts), search), [list(t) for t in texts], 1
    step(model, states, rows)
    for move, amount in [*moves, ("say", 3)]:
        if move == "fan" and group == 1:
            states.repeat_rows(2)
            rows, group = [list(t) for t in rows for _ in range(2)], 2
        elif move == "select":
            order = [(n + amount) % (len(rows) // group) for n in range(len(rows) // group)]
            kept = [source * group + (n * amount) % group for source in order for n in range(group)]
            states.select(kept)
            rows = [list(rows[row]) for row in kept]
        elif move == "trim":
            states.trim(amount)
            rows = [t[:amount] for t in rows]
        elif move == "cut":
            own = [1 + (amount * (3 + row)) % len(t) for row, t in enumerate(rows)]
            states.trim(own)
            rows = [t[:left] for t, left in zip(rows, own, strict=True)]
        new = [[(amount * 3 + row + n) % (VOCAB - 1) + 1 for n in range(1 + row % 2)] for row in range(len(rows))]
        logits = step(model, states, new)
        rows = [t + added for t, added in zip(rows, new, strict=True)]
        for tokens, added, row in zip(rows, new, logits, strict=True):
            close(row, alone(model, tokens)[-len(added) :])


@pytest.mark.parametrize("start, time", [(0, 63), (0, 5), (10, 53), (7, 1), (62, 1), (0, 100), (100, 3)])
def test_chunk_blocks_match_the_dense_mask(start, time):
    """The quick way against the definition, outputs and gradients, also where fewer blocks are there than chunks."""
    torch.manual_seed(start + time)
    model = build(tree(CROSS | {"chunk": 8}))
    with torch.no_grad():
        memory = model.encode(Neighbours(torch.randint(0, VOCAB, (2, 11, K, 16)), torch.randint(0, 17, (2, 11, K))))
    queries = TokenLayout(torch.arange(start, start + time)[None], start=start)
    q = torch.randn(2, 4, time, 6, dtype=torch.double, requires_grad=True)
    k, v = (torch.randn(2, 2, 11 * K * 16, 6, dtype=torch.double, requires_grad=True) for _ in range(2))
    dense = DenseAttention(mask(8, queries, memory.layout), queries.positions, memory.layout.positions)
    answers = []
    for plan in (ChunkBlocks(8, start, memory), dense):
        out = plan(q, k, v, 0.0, ScoreMod(0.4))
        gradients = torch.autograd.grad((out.sin() + 0 * (q.sum() + k.sum() + v.sum())).sum(), (q, k, v))
        answers.append((out, *gradients))
    torch.testing.assert_close(answers[0], answers[1], atol=1e-9, rtol=0)


def test_without_neighbours_it_is_a_decoder():
    model = MODELS["plain"]
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    nothing = Neighbours(torch.zeros(1, 2, K, 2 * M, dtype=torch.long), torch.zeros(1, 2, K, dtype=torch.long))
    with torch.no_grad():
        found = [model.logits(Batch(Rows(tokens), source)) for source in (None, nothing)]
    close(found[0], found[1])
    with torch.no_grad():
        close(model.head(model.advance(Rows(tokens), model.start(1))), found[0])


def test_recorded_cross_weights_cover_the_previous_chunk():
    weights = MODELS["plain"].attention(
        Batch(Rows(torch.tensor([[1, 2, 3, 4, 5, 6]])), neighbours([[1, 2, 3, 4, 5, 6]]))
    )
    assert list(weights) == [1, 2] and weights[1].shape == (1, HEADS, 6, 2 * K * 2 * M)
    assert not weights[1][:, :, :2].any() and not weights[1][:, :, 2:5, K * 2 * M :].any()


def test_packed_rows_with_neighbours_are_refused():
    packed = Rows(torch.tensor([[1, 2, 3]]), segments=torch.tensor([[1, 1, 2]]))
    with pytest.raises(ValueError, match="one text per row"):
        MODELS["plain"].logits(Batch(packed, neighbours([[1, 2, 3]])))


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"decoder": [{"mixer": ATTENTION | {"pattern": "causal"}}]}, "no layer with a chunked-cross"),
        ({"decoder": [{"cross": CROSS}, {"cross": CROSS | {"chunk": 4}}]}, "chunks of 3 and 4"),
        (
            {"decoder": [{"cross": ATTENTION}, {"cross": CROSS}]},
            "decoder[0].cross.kind: would attend to later neighbours",
        ),
        ({"encoder": [{"mixer": CROSS}]}, "encoder[0].mixer.kind: needs an encoder"),
        ({"encoder": [{"cross": CROSS}]}, "encoder[0].cross.kind: must be attention (to the querying chunk)"),
        (
            {"encoder": CONDITIONED, "decoder": [{"wiring": "reversible", "cross": CROSS}]},
            "decoder[0].wiring: recomputes layers",
        ),
        ({"encoder_width": 8}, "encoder_width: must be the width of the token vectors, 12; set embed.inner"),
        ({"querying": "hidden"}, "querying: no encoder layer reads the querying chunk"),
        (
            {"encoder": CONDITIONED, "querying": "hidden", "decoder": [{"wiring": "post-norm", "cross": CROSS}]},
            "querying: the first retrieving layer has no norm before its attention",
        ),
        ({"decoder": [{"cross": CROSS | {"positions": "alibi"}}]}, "decoder[0].cross.positions: supports rotary only"),
        ({"encoder": [READS | {"cross": ATTENTION | {"positions": "alibi"}}]}, "encoder[0].cross.positions: distances"),
    ],
)
def test_invalid_configs_are_refused(keys, said):
    with pytest.raises(ConfigError) as error:
        parse(Model, tree(**keys))
    assert said in str(error.value)


COSTS = {"plain": {}, "conditioned": {"encoder": CONDITIONED}, "own width": OWN_WIDTH | {"querying": "hidden"}}
COSTS["embeddings"] = OWN_WIDTH | {"querying": "embedding"}


@pytest.mark.parametrize("keys", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("chunks", [1, 5])
def test_cost_matches_the_model_and_its_state(chunks, keys):
    config = parse(Model, tree(**keys))
    model = config.build().eval()
    cost = config.cost(chunks * M)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        states = model.start(1, search=lambda found: [[[1] * 2 * M] * K for _ in found])
        for _ in range(chunks * M):
            model.advance(Rows(torch.tensor([[1]])), states)
    assert states.bytes == 4 * (cost.state_per_token * chunks * M + cost.state_constant)


@pytest.mark.parametrize("keys", COSTS.values(), ids=COSTS)
def test_flops_match_torchs_counter(keys):
    """Except for scores removed by the causal mask, which a kernel computes anyway."""
    config, chunks, batch = parse(Model, tree(**keys)), 5, 2
    model, time = config.build(), chunks * M
    given = Neighbours(torch.ones(batch, chunks, K, 2 * M).long(), torch.full((batch, chunks, K), 2 * M))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.logits(Batch(Rows(torch.ones(batch, time).long()), given))
    masked_away = 3 * 4 * WIDTH * (time - (time + 1) / 2)
    assert counter.get_total_flops() == pytest.approx(batch * time * (config.cost(time).flops + masked_away))


# --- without retrieval ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wiring", ["pre-norm", "post-norm", "sandwich", "parallel", "resi-dual"])
@pytest.mark.parametrize("null", [False, True])
def test_without_neighbours_it_is_a_plain_decoder(wiring, null):
    """The same numbers as of a decoder with its weights and without the cross-attention, whole and step by step."""
    layer = {"wiring": wiring, "mixer": ATTENTION | {"pattern": "causal"}, "channel": CHANNEL}
    retrieving = layer | {"cross": CROSS | {"null": null}}
    model = build(tree(decoder=[layer, retrieving], encoder=[READS | {"wiring": wiring}]))
    config = {"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "embed": {"positions": "sinusoidal"}}
    plain = build(config | {"decoder": [layer, layer]})
    each = len(plain.decoder.blocks[1].wiring.norms) // 2  # norms of a sub-layer
    wanted = plain.state_dict()
    for name, tensor in model.state_dict().items():
        start = "decoder.blocks.1.wiring.norms."
        if name.startswith(start) and len(model.decoder.blocks[1].wiring.norms) == 3 * each:
            number, rest = name.removeprefix(start).split(".")
            if each <= int(number) < 2 * each:
                continue  # of the cross-attention
            name = f"{start}{int(number) - each * (int(number) >= 2 * each)}.{rest}"
        if name in wanted:
            wanted[name] = tensor
    plain.load_state_dict(wanted)
    rows = Rows(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1]]))
    with torch.no_grad():
        expected = plain.logits(Batch(rows))
        close(model.logits(Batch(rows)), expected)
        states = model.start(1)
        steps = [model.head(model.advance(Rows(column), states)) for column in rows.tokens.split([4, 1, 2, 3], 1)]
    close(torch.cat(steps, 1), expected)


@pytest.mark.parametrize("width", [2, 4, 9])
@pytest.mark.parametrize("null", [False, True])
def test_neighbours_of_any_width_stand_at_their_places(width, null):
    """Padding behind a neighbour is no token, and moves none of the others."""
    model = build(tree(CROSS | {"positions": "rotary", "null": null, "head_width": 4}))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    found = [[[[4, 5], [6]], [[6, 7]], [[9], [8, 1]]]]
    with torch.no_grad():
        logits = [
            model.logits(Batch(Rows(torch.tensor([tokens])), Neighbours.of(found, K, size))) for size in (2 * M, width)
        ]
        states = model.start(Neighbours.of(found, K, width))
        pieces = torch.tensor([tokens]).split([4, 1, 2, 3], 1)
        steps = torch.cat([model.head(model.advance(Rows(piece), states)) for piece in pieces], 1)
    close(logits[1], logits[0])
    close(steps, logits[0])
