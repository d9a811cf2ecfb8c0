"""A beam search as a tree: every candidate of every step with its scores, and what became of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis

Fate = Literal["kept", "pruned", "finished"]


class BeamCandidate(NamedTuple):
    """One continuation as `BeamSearch.step` saw it: `beam` is the row it continues, `total` the log-probability of the
    whole hypothesis."""

    beam: int
    token: int
    log_prob: float
    total: float
    fate: Fate


@dataclass(frozen=True)
class BeamNode:
    """`parent`: index of a node, -1 for the empty hypothesis. `step`: tokens before it. `log_prob`: of this token;
    `total`: of all tokens up to it; `score`: `total` over the length penalty, as if the hypothesis ended here."""

    parent: int
    step: int
    token: int
    log_prob: float
    total: float
    score: float
    fate: Fate


@dataclass
class BeamRecord:
    """The observer of one request (`Request.observer`). `nodes`: parents before children, best first in each step.
    `rows`: the nodes that the beams are at; the search ended before those that are left could finish."""

    nodes: list[BeamNode] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add_step(
        self, spec: DecodingSpec, length: int, candidates: Sequence[BeamCandidate], rows: Sequence[int]
    ) -> None:
        """`length`: tokens before this step. `rows`: for each beam that continues, the index of its candidate."""
        divisor = spec.decoding.length_divisor(length + 1 + spec.counted_prompt)
        first = len(self.nodes)
        for one in candidates:
            parent = self.rows[one.beam] if self.rows else -1
            self.nodes.append(
                BeamNode(parent, length, one.token, one.log_prob, one.total, one.total / divisor, one.fate)
            )
        self.rows = [first + index for index in rows]

    def path(self, node: int) -> list[int]:
        """The nodes from the first token to this one."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def tokens(self, node: int) -> list[int]:
        """The hypothesis that ends with this node."""
        return [self.nodes[one].token for one in self.path(node)]

    def find(self, hypothesis: Hypothesis, eos: Collection[int]) -> int | None:
        """The node at which a hypothesis of this search ended: that of its end mark, or of its last token where it
        reached the limit or was cut."""
        children = {(one.parent, one.token): number for number, one in enumerate(self.nodes)}
        node: int | None = -1
        for token in hypothesis.tokens:
            node = None if node is None else children.get((node, token))
        if len(hypothesis.log_probs) > len(hypothesis.tokens):
            ends = (children.get((-1 if node is None else node, token)) for token in eos)
            node = next((end for end in ends if end is not None and self.nodes[end].fate == "finished"), None)
        return None if node == -1 else node
