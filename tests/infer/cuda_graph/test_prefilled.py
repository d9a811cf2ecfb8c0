"""Windows of sound, whose prompts were read without an engine, decode in slots as in the transcriber's plain batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.base import States
from graph_runner import Processor, token_lists
from shrink import batch_for, shrink


@pytest.mark.parametrize("decoding", [Decoding(beam=3, max_length=9), Decoding(method="sample", best=2, max_length=9)])
def test_sounds_decode_in_slots_as_in_a_plain_batch(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    config: Any = shrink(parse(Model, preset_tree("whisper-tiny")))  # type: ignore[type-abstract]
    model: Any = config.build().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    prompts = [[1, *range(5, 5 + n)] for n in range(6)]
    spec = DecodingSpec(decoding, 2, logits_processor=Processor())
    graphs = GraphRunnerCache(ModelRunner(model, 1, 2, 0, limit=config.limit))
    found = []
    for captured in (False, True):
        requests = [RequestState(Request(prompt, 9, (n,)), spec, 9 - n % 3) for n, prompt in enumerate(prompts)]
        with torch.inference_mode():
            memory = model.encode(batch_for(config).source)
            states = States(model.decoder.new_states(), len(prompts), memory.hidden.device, memory)
            hidden = model.advance(Rows.of(prompts), states)
            if captured:
                assert not graphs.decode_prefilled(states, requests), "no GPU here"
                monkeypatch.setattr(GraphRunnerCache, "admits", lambda self, some: self.suits(some[0].spec))
                assert graphs.decode_prefilled(states, requests) and len(graphs.kept) == 1
            else:
                lasts = torch.tensor([len(prompt) - 1 for prompt in prompts])
                RunningBatch(model, states, [(spec, requests)]).run(hidden[torch.arange(len(prompts)), lasts])
        found.append(token_lists([request.hypotheses for request in requests]))
    assert found[0] == found[1] and len({str(one) for one in found[0]}) > 3
