from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.recurrence.retention_forms import MIXERS
from allyouneed.lab.claims.trees import attention, built, decoder
from allyouneed.nn.batch import Rows


@torch.no_grad()
def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((64, 256, 1024), (32, 64))
    curves: dict[str, dict[float, float]] = {}
    for name, mixer in {"attention": attention(), **MIXERS}.items():
        model = built(decoder(mixer)).eval()
        for length in lengths:
            states = model.start(1)
            model.advance(Rows(torch.zeros(1, length, dtype=torch.long)), states)
            curves.setdefault(name, {})[float(length)] = float(states.bytes)
    grown = {name: found[lengths[-1]] / found[lengths[0]] for name, found in curves.items()}
    times = lengths[-1] / lengths[0]
    figures = [
        Figure((f"{name}: state, longest over shortest", f"{name}：状态，最长/最短"), (grown[name],), 1.0, 1.05)
        for name in MIXERS
    ]
    control = Figure(
        ("attention: the same", "注意力：同上"), (grown["attention"],), 0.9 * times, 1.1 * times, control=True
    )
    return Outcome((*figures, control), curves, ("tokens read", "bytes of state"), log=True)


CLAIM = Claim(
    "Peng et al. 2023, RWKV, 1; Sun et al. 2023, Retentive Network, 1; Gu, Dao 2023, Mamba, 1",
    (
        "Decoding needs O(1) memory, whatever the length of the text; the cache of attention grows with it.",
        "解码内存为 O(1)，与文本长度无关；注意力的缓存则随之增长。",
    ),
    (
        "Bytes of the allocated decoding state after prompts of 64 to 1,024 tokens.",
        "64 到 1,024 个词元的提示之后，实际分配的解码状态字节数。",
    ),
    measure,
)
