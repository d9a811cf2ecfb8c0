"""Conversion between sharded tensors (torch's DTensor) and full ones.

The optimiser state is written by all processes at once through torch.distributed.checkpoint, each its own part as
safetensors, and can be read by any other number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from allyouneed.data.files.mapped import MappedFile
from allyouneed.files import write_text
from allyouneed.folder import check_fit
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors
from allyouneed.runtime.process import ignore_warnings
from allyouneed.torch_private import tensor_norms
from allyouneed.training.distributed.tensor_parallel import row_orders, tensor_parallel_size

LAYOUT = "layout.json"  # the tensor-parallel degree that orders the rows of the shards


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def distribute_like(whole: Tensor, model: Tensor, order: Tensor | None = None) -> Tensor:
    """A copy of a full tensor, distributed like another; every process passes the full tensor. `order`: permutation of
    its rows (see `row_orders`)."""
    here = whole.to(model.device, copy=True)
    if not isinstance(model, DTensor) or whole.ndim == 0:
        return here
    here = here if order is None else here[order.to(here.device)]
    return distribute_tensor(here, model.device_mesh, model.placements, src_data_rank=None)


def gather_model(model: nn.Module, config: Model, device: torch.device, keep: bool) -> nn.Module | None:
    """The unsharded model on processes with `keep`. A collective: all processes must call it."""
    found: dict[str, Tensor] = {}
    orders = row_orders(model, tensor_parallel_size(model))
    for name, tensor in named_tensors(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole = whole if name not in orders else whole[orders[name].argsort().to(whole.device)]
            found[name] = whole.detach().to(device, copy=True)
    if not keep:
        return None
    plain = meta_model(config)
    assign_weights(plain, found)
    return plain.train(model.training)


def read_sharded(model: nn.Module, file: Path) -> None:
    """Load a safetensors file; each process reads it and keeps its part."""
    stored, wanted = MappedFile(file), named_tensors(model)
    check_fit(file, stored, wanted, left_over=sorted(set(stored) - set(wanted)))
    orders = row_orders(model, tensor_parallel_size(model))
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(distribute_like(stored[name], tensor, orders.get(name)))


def sharded_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The global norm of sharded gradients; replicated ones count once."""
    parts, copies = [], []
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            parts.append(gradient)
            copies.append(float(dist.get_world_size()))
            continue
        mesh = gradient.device_mesh
        parts.append(gradient.to_local())
        same = [mesh.size(axis) for axis, kind in enumerate(gradient.placements) if isinstance(kind, Replicate)]
        outside = dist.get_world_size() // mesh.size()
        copies.append(float(torch.tensor([*same, outside]).prod()))
    norms = torch.stack(tensor_norms(parts)).float()
    total = (norms.square() / torch.tensor(copies, device=norms.device)).sum()
    dist.all_reduce(total)
    return total.sqrt()


# --- optimiser state ------------------------------------------------------------------------------------------------


def write_shards(tensors: dict[str, Tensor], folder: Path, degree: int) -> None:
    """A collective; each process writes its part. `degree`: of tensor parallelism."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    if dist.get_rank() == 0:
        write_text(folder / LAYOUT, json.dumps({"tensor": degree}) + "\n")


def read_shards(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser state, each tensor distributed like its parameter now is."""
    parameters = dict(model.named_parameters())
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    known: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {}
    for path, about in known.items():
        parameter = parameters[path.partition("/")[2]]
        device = parameter.device
        found[path] = torch.zeros_like(parameter) if about.size else torch.zeros((), device=device)
    with ignore_warnings():  # torch warns when a single process loads; that is supported here
        load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    layout = folder / LAYOUT
    then = json.loads(layout.read_text(encoding="utf-8"))["tensor"] if layout.exists() else 1
    if then != (now := tensor_parallel_size(model)):
        old, new = row_orders(model, then), row_orders(model, now)
        for path, tensor in found.items():
            name = path.partition("/")[2]
            if tensor.ndim and (name in old or name in new):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                whole = whole[old[name].argsort().to(whole.device)] if name in old else whole
                found[path] = distribute_like(whole, parameters[name], new.get(name))
    return {path: tensor.detach() for path, tensor in found.items()}
