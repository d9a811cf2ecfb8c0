"""Runs of several processes, as torchrun starts them, without paying for its imports: they are forked from one that
has imported everything and done nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

from allyouneed.training import load_recipe, train
from allyouneed.training.distributed.process_group import is_peer_lost, join_process_group, lost_peer_report
from waiting import PATIENCE

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "allyouneed.cli",
        "allyouneed.training",
        "allyouneed.interop.load",
        "allyouneed.infer.predictors.generator",
        "allyouneed.apps.translate.translator",
        "torch.distributed.fsdp",
    ]
)


def train_with(recipe: Path, processes: int, *changes: str) -> None:
    """Train by a recipe file in several processes; an error in any of them is raised here."""
    started, ends = start_training(recipe, processes, _free_port(), *changes)
    failure, waiting = "", list(ends)
    while waiting and not failure:
        ready: list[Any] = wait(waiting, timeout=PATIENCE)
        failure = "nobody is heard of any more" if not ready else ready[0].recv()
        waiting = [end for end in waiting if end not in ready[:1]]
    for process in started:
        if failure:
            process.kill()  # it would wait for the one that failed
        process.join()
    assert not failure, failure


def start_training(
    recipe: Path, processes: int, port: int, *changes: str, **environment: str
) -> tuple[list[Any], list[Any]]:
    """The processes of a run, and of each the end of a pipe that says how it went: nothing, or its error."""
    started, ends = [], []
    for rank in range(processes):
        here, there = SERVER.Pipe(duplex=False)
        arguments = (there, str(recipe), changes, rank, processes, port, "", environment)
        process = SERVER.Process(target=_run, args=arguments, daemon=True)
        process.start()
        started.append(process)
        ends.append(here)
    return started, ends


def _run(
    end: Connection,
    recipe: str,
    changes: tuple[str, ...],
    rank: int,
    world: int,
    port: int,
    result: Any = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    os.environ.update(environment)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if world > 1:
        os.environ.update({name: str(value) for name, value in place.items()})
    try:
        train(load_recipe(recipe, changes))
        end.send(result)
    except BaseException:
        end.send(f"process {rank}:\n{traceback.format_exc()}")


def stop_one(recipe: Path, processes: int, stopped: int, during: str) -> dict[int, str]:
    """Processes of a run with a patience of 6 seconds, one of which is stopped (SIGSTOP) in its second update or while
    the main process works alone; what each of the others reports, by rank."""
    port, ends, started, together = _free_port(), {}, [], SERVER.Barrier(processes)
    for rank in range(processes):
        here, there = SERVER.Pipe(duplex=False)
        process = SERVER.Process(
            target=_wait_in_vain,
            args=(there, str(recipe), rank, processes, port, stopped, during, together),
            daemon=True,
        )
        process.start()
        started.append(process)
        if rank != stopped:
            ends[rank] = here
    reports = {rank: end.recv() if end.poll(PATIENCE) else "nothing" for rank, end in ends.items()}
    for process in started:
        process.kill()
        process.join()
    return reports


def _wait_in_vain(
    end: Connection, recipe: str, rank: int, world: int, port: int, stopped: int, during: str, together: Any
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})

    def stop(where: str) -> None:
        if rank == stopped and where == during:
            os.kill(os.getpid(), signal.SIGSTOP)

    read = load_recipe(recipe, ["parallel.patience=0.1"])
    together.wait()  # none spends the patience of the others on being started
    with join_process_group(read) as group:
        try:
            group.on_main(lambda: time.sleep(7), "preparing the data")  # longer than the patience
            for step in range(1, 4):
                group.at(f"update {step}")
                stop(f"update {step}")
                group.any_flag(False)
            group.on_main(lambda: stop("validation"), "validation")
            end.send("nothing happened")
        except RuntimeError as error:
            end.send(lost_peer_report(group, error) if is_peer_lost(error) else f"not a lost peer: {error}")
            threading.Event().wait()  # the others may not have asked yet; it is killed when all have reported


def inspect_training(recipe: Path, processes: int, *changes: str) -> list[Any]:
    """What `train` in several processes applies to the model: of each process, the types of weights as they are stored,
    as the blocks compute with them, and of their gradients; and whether unused parameters are looked for."""
    port, ends, started = _free_port(), [], []
    for rank in range(processes):
        here, there = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=_inspect, args=(there, str(recipe), changes, rank, processes, port))
        process.start()
        started.append(process)
        ends.append(here)
    found = [end.recv() if end.poll(PATIENCE) else "nothing" for end in ends]
    for process in started:
        process.join()
    return found


def _inspect(end: Connection, recipe: str, changes: tuple[str, ...], rank: int, world: int, port: int) -> None:
    from allyouneed.nn.models.block import Block
    from allyouneed.training.loop import Trainer

    run_to_the_end, found = Trainer.run, {}

    def run(trainer: Trainer) -> None:
        block = next(module for module in trainer.model.modules() if isinstance(module, Block))
        names = {"stored": lambda weight: weight.dtype, "gradients": lambda weight: weight.grad.dtype}

        def computed(module: Block, *_: Any) -> None:
            found["computed"] = {weight.dtype for weight in module.parameters()}

        block.register_forward_pre_hook(computed)
        step = trainer.optimiser.step

        def inspected(*args: Any, **more: Any) -> Any:
            for name, dtype in names.items():
                found[name] = {dtype(weight) for weight in block.parameters() if weight.grad is not None}
            return step(*args, **more)

        trainer.optimiser.step = inspected
        run_to_the_end(trainer)
        found["finds unused"] = getattr(trainer.wrapped_model, "finds_unused", None)

    Trainer.run = run
    _run(end, recipe, changes, rank, world, port, found)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
