"""Tensors of which each process holds a part (torch's DTensor), and the way between them and whole ones.

What the optimiser remembers is written by all processes at once through torch.distributed.checkpoint, each its own part
as safetensors, and read by any other number of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from allyouneed.folder import check_fit
from allyouneed.mapped import MappedFile
from allyouneed.nn.filling import hollow, named, put
from allyouneed.nn.model import Model


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def like(whole: Tensor, model: Tensor) -> Tensor:
    """A copy of a whole tensor, spread as another is: every process has it and keeps its part."""
    here = whole.to(model.device, copy=True)
    if not isinstance(model, DTensor) or whole.ndim == 0:
        return here
    return distribute_tensor(here, model.device_mesh, model.placements, src_data_rank=None)


def gathered(model: nn.Module, config: Model, device: torch.device, keep: bool) -> nn.Module | None:
    """The whole model in one piece, for those who `keep` it. All processes take part."""
    found: dict[str, Tensor] = {}
    for name, tensor in named(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.detach().to(device, copy=True)
    if not keep:
        return None
    plain = hollow(config)
    put(plain, found)
    return plain.train(model.training)


def read_sharded(model: nn.Module, file: Path) -> None:
    """Fill a model from a safetensors file; each process reads it and keeps its part."""
    stored, wanted = MappedFile(file), named(model)
    check_fit(file, stored, wanted, left_over=sorted(set(stored) - set(wanted)))
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(like(stored[name], tensor))


def norm_of_parts(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of gradients of which each process has a part; what several have counts once."""
    parts, copies = [], []
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        mesh = gradient.device_mesh
        parts.append(gradient.to_local())
        same = [mesh.size(axis) for axis, kind in enumerate(gradient.placements) if isinstance(kind, Replicate)]
        outside = dist.get_world_size() // mesh.size()
        copies.append(float(torch.tensor([*same, outside]).prod()))
    norms = torch.stack(torch._foreach_norm(parts)).float()
    total = (norms.square() / torch.tensor(copies, device=norms.device)).sum()
    dist.all_reduce(total)
    return total.sqrt()


# --- what the optimiser remembers -----------------------------------------------------------------------------------


def write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """All processes together; each writes its part."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_shards(folder: Path, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What was written, each tensor spread over the processes of now as its parameter is."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    known: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {}
    for path, about in known.items():
        parameter = parameters[path.partition("/")[2]]
        device = parameter.device
        found[path] = torch.zeros_like(parameter) if about.size else torch.zeros((), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a single process reads it is what is meant
        load(found, storage_reader=HuggingFaceStorageReader(str(folder)))
    return {path: tensor.detach() for path, tensor in found.items()}
