"""The state of a recurrence against the plain recurrence, after any sequence of updates, selections and trims."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.states.recurrent import TAIL, Recurrent, recurrent_cost
from allyouneed.nn.states.window import MAX_TRIM
from any_part import VOCAB, build

FEATURES = 3


def begin(batch, like):
    return like.new_zeros(batch, FEATURES), like.new_zeros(batch, 2, 2)


def fold(carry, inputs, real):
    """A recurrence of two tensors that depends on the order of its inputs."""
    first, second = carry
    for t in range(inputs.shape[1]):
        x = inputs[:, t]
        new = 0.9 * first + x, (second + x[:, :2, None]) * torch.tensor([0.5, -0.7]).to(x)
        inside = torch.ones(len(x), dtype=torch.bool) if real is None else real[:, t]
        first = torch.where(inside[:, None], new[0], first)
        second = torch.where(inside[:, None, None], new[1], second)
    return first, second


def run(inputs, carry, real, other):
    """The carry's first part after every token, and another tensor as it was given."""
    found = []
    for t in range(inputs.shape[1]):
        carry = fold(carry, inputs[:, t : t + 1], None if real is None else real[:, t : t + 1])
        found.append(carry[0])
    return (torch.stack(found, 1) if found else inputs, other), carry


class Trial:
    """A state and the rows of inputs it has seen."""

    def __init__(self, rows):
        self.state, self.rows = Recurrent(begin, fold), [torch.zeros(0, FEATURES).double() for _ in range(rows)]

    def take(self, counts, whole=True):
        time = max(counts)
        inputs = torch.randn(len(counts), time, FEATURES, dtype=torch.double)  # padding is noise, to be ignored
        lengths = None if min(counts) == time else torch.tensor(counts)
        layout = TokenLayout.following(
            [len(row) for row in self.rows], Rows(torch.ones(len(counts), time).long(), lengths)
        )
        end = max(map(len, self.rows)) + time
        context = Context(layout, slots=TokenLayout(torch.arange(end)[None], start=0))
        if whole:
            carry = fold(self.state.carry(len(counts), inputs), inputs, layout.real)
            self.state.update(inputs, carry, context)
        else:
            self.check_outputs(self.state.advance(run, inputs, context, inputs[..., :1] * 2), inputs, counts)
        self.rows = [torch.cat([row, new[:n]]) for row, new, n in zip(self.rows, inputs, counts, strict=True)]

    def select(self, kept):
        self.state.select(torch.tensor(kept))
        self.rows = [self.rows[row] for row in kept]

    def trim(self, length):
        self.state.trim(length)
        self.rows = [row[:length] for row in self.rows]

    def cut(self, lengths):
        self.state.trim(max(lengths), torch.tensor(lengths))
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    def check_outputs(self, found, inputs, counts):
        """Each is the first part of the carry at its token, whatever the pieces of the pass."""
        for row, (seen, new, n) in enumerate(zip(self.rows, inputs, counts, strict=True)):
            rows = torch.cat([seen, new[:n]])
            outputs, _ = run(rows[None], begin(1, rows), None, rows[None, :, :1] * 2)
            torch.testing.assert_close(found[0][row, :n], outputs[0][0, len(seen) :], atol=1e-9, rtol=0)
            torch.testing.assert_close(found[1][row, :n], outputs[1][0, len(seen) :], atol=0, rtol=0)

    def check(self):
        alone = [fold(begin(1, row), row[None], None) for row in self.rows]
        for found, parts in zip(self.state.now, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(found, torch.cat(parts), atol=1e-9, rtol=0)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any)),
        st.tuples(st.just("take"), st.lists(st.integers(0, 200), min_size=4, max_size=4).filter(any)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        st.tuples(st.just("trim"), st.integers(0, MAX_TRIM)),
        st.tuples(st.just("cut"), st.lists(st.integers(0, MAX_TRIM), min_size=4, max_size=4)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(moves)
def test_any_history_gives_the_carry_of_its_rows(moves):
    trial = Trial(3)
    furthest = [0, 0, 0]  # the most tokens each row had: trimming counts from there
    for move, how in moves:
        rows = len(trial.rows)
        if move == "take" and any(how[:rows]):
            trial.take(how[:rows], whole=sum(how) % 2)
        elif move == "step":
            for _ in range(how):
                trial.take([1] * rows)
        elif move == "select":
            trial.select([row % rows for row in how])
            furthest = [furthest[row % rows] for row in how]
        elif move == "trim" and (length := max(furthest) - how) >= 0:
            trial.trim(length)
        elif move == "cut":
            trial.cut([max(0, far - back) for far, back in zip(furthest, how, strict=False)])
        furthest = [max(far, len(row)) for far, row in zip(furthest, trial.rows, strict=True)]
        if trial.state.now is not None:
            trial.check()


def test_state_size_is_constant_and_trimming_is_limited():
    trial = Trial(2)
    assert trial.state.bytes == 0
    sizes = set()
    for counts in ([1, 1], [100, 97], [0, 43], [1000, 2], *([[1, 1]] * 150)):
        trial.take(counts, whole=counts[0] < 1000)
        sizes.add(trial.state.bytes)
    assert sizes == {8 * 2 * int(recurrent_cost(FEATURES + 4, FEATURES).state_constant)}
    assert recurrent_cost(5, 7).state_constant == 2 * 5 + TAIL * 7
    longest = max(map(len, trial.rows))
    with pytest.raises(ValueError, match=f"can trim at most {MAX_TRIM} tokens"):
        trial.trim(longest - MAX_TRIM - 1)
    trial.check()
    trial.trim(longest - MAX_TRIM)
    trial.check()
    with pytest.raises(ValueError, match="trim at most"):
        trial.trim(0)


def test_a_short_text_can_be_trimmed_to_nothing():
    trial = Trial(2)
    trial.take([TAIL - 1, 3])
    trial.trim(0)
    trial.check()
    trial.take([3, 5])
    trial.check()


@settings(max_examples=20)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_folding_is_rare(counts):
    """A fold of the snapshot reads at least MAX_TRIM tokens, so its cost is spread over as many steps."""
    folds = []

    def counting(carry, inputs, real):
        folds.append(inputs.shape[1])
        return carry

    state = Recurrent(begin, counting)
    seen = 0
    for count in [*counts, *([1] * TAIL)]:
        layout = TokenLayout.following([seen], Rows(torch.ones(1, count).long()))
        inputs = torch.zeros(1, count, FEATURES)
        state.update(inputs, state.carry(1, inputs), Context(layout))
        seen += count
    assert len(folds) <= seen / MAX_TRIM


RECURRENT = {
    "retention": {"heads": 2}, "gated-retention": {"heads": 2}, "performer": {"heads": 2}, "mixed-chunk": {"chunk": 9},
    "mamba": {}, "mamba2": {"heads": 2}, "s4": {}, "rwkv": {}, "lstm": {}, "gru": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_long_prompt_is_read_once(kind, monkeypatch):
    """Outputs and snapshot come from the same pass, also in rows of unequal length; then tokens can be trimmed."""
    layer = {"mixer": {"kind": kind} | RECURRENT[kind], "channel": {"kind": "ffn", "hidden": 8}}
    model, lengths = build({"kind": "decoder", "vocab": VOCAB, "width": 12, "decoder": [layer]}), [200, 71, 3]
    tokens = torch.arange(3 * 210).view(3, 210) * 7 % (VOCAB - 1) + 1
    with torch.no_grad():
        whole = [model.logits(Batch(Rows(tokens[i : i + 1, : n + 6]))) for i, n in enumerate(lengths)]
        states = model.start(3)
        for layer in states.layers:
            for state in layer.values():
                monkeypatch.setattr(state, "fold", None)
        found = model.head(model.advance(Rows(tokens[:, :200], torch.tensor(lengths)), states))
        for i, n in enumerate(lengths):
            torch.testing.assert_close(found[i, :n], whole[i][0, :n], atol=1e-9, rtol=0)
        monkeypatch.undo()
        states.trim([n - 2 for n in lengths])
        following = torch.stack([tokens[i, n - 2 : n + 6] for i, n in enumerate(lengths)])
        found = model.head(model.advance(Rows(following), states))
    for i, n in enumerate(lengths):
        torch.testing.assert_close(found[i], whole[i][0, n - 2 : n + 6], atol=1e-9, rtol=0)
