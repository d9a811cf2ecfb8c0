from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder, slope
from allyouneed.nn.batch import Batch, Rows


def stored(wiring: str, layers: int) -> float:
    """Bytes that a forward pass keeps for the backward pass, without parameters."""
    model = built(decoder(layers=layers, wiring=wiring)).train()
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, int]()

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    tokens = torch.randint(0, 64, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = model(Batch(Rows(tokens)))
        float(hidden.sum())
    return float(sum(kept.values()))


def measure(run: ClaimRun) -> Outcome:
    depths = run.pick((2, 4, 8, 16), (2, 4))
    curves = {name: {float(n): stored(name, n) for n in depths} for name in ("pre-norm", "reversible")}
    return Outcome(
        (
            Figure(
                ("reversible: exponent of depth in what is kept", "可逆：保留量随深度的指数"),
                (slope(curves["reversible"]),),
                -0.05,
                0.3,
            ),
            Figure(("pre-norm: the same", "pre-norm：同上"), (slope(curves["pre-norm"]),), 0.8, 1.05, control=True),
        ),
        curves,
        ("layers", "bytes kept for the backward pass"),
        log=True,
    )


CLAIM = Claim(
    "Kitaev et al. 2020, Reformer, 3",
    (
        "With reversible layers the memory of activations does not grow with the number of layers.",
        "采用可逆层后，激活值的内存不随层数增长。",
    ),
    (
        "Bytes that a forward pass keeps for the backward pass (counted by torch's hooks), 2 to 16 layers.",
        "前向传播为反向保留的字节数（由 torch 的钩子统计），2 到 16 层。",
    ),
    measure,
)
