"""Requests whose prompts were read without an engine, as those of encoded sounds, decoded to their ends by a graph
runner."""

from __future__ import annotations

from collections.abc import Sequence

from allyouneed.infer.cuda_graph.runner import GraphBatch, GraphRunnerCache
from allyouneed.infer.decoding.base import RequestState
from allyouneed.nn.states.base import States


def decode_prefilled(graphs: GraphRunnerCache, states: States, requests: Sequence[RequestState]) -> bool:
    """Decode requests of one specification; `states` have read their whole prompts, a row each. False: graphs do not
    suit them, and nothing has changed."""
    if not graphs.admits(requests):
        return False
    key = graphs.shape(requests, 0 if states.memory is None else states.memory.hidden.shape[1])
    if key.slots < len(requests):
        return False
    graphs.drop_stale(key)
    try:
        runner = graphs.runner(key)
    except Exception as error:
        graphs.refuse(error, key.kind)
        return False
    batch = GraphBatch(runner, graphs.engine, cache=graphs, key=key)
    batch.add(states, range(len(requests)), requests)
    while batch.active:
        batch.step()
    batch.close()
    for state in requests:
        if state.error is not None:
            raise state.error
    return True
