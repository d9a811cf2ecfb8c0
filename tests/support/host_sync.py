"""What a CUDA graph cannot capture, found on a CPU: operations that read a tensor on the host, whose shape depends on
values, or that copy numbers from the host."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive")
READS += ("equal", "is_nonzero", "bincount", "repeat_interleave.Tensor", "lift_fresh")  # lift_fresh: torch.tensor(…)


class NoHostSync(TorchDispatchMode):
    """Raises where a captured step would wait for the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name in READS or name.rsplit(".", 1)[0] in READS:
            raise AssertionError(f"{func} waits for the host")
        if name.startswith(("index.", "index_put")):  # a mask as an index is looked up on the host
            for index in args[1]:
                if index is not None and index.dtype.is_floating_point is False and index.element_size() == 1:
                    raise AssertionError(f"{func} by a mask waits for the host")
        return func(*args, **(kwargs or {}))
