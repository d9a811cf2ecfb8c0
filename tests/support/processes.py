"""Runs of several processes, as torchrun starts them, without paying for its imports: they are forked from one that
has imported everything and done nothing."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from allyouneed.train import load_recipe, train

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["allyouneed.train", "allyouneed.infer.predictors.registry", "torch.distributed.fsdp"])


def train_with(recipe: Path, processes: int, *changes: str) -> None:
    """Train by a recipe file with so many processes; what goes wrong in any of them goes wrong here."""
    port = _free_port()
    started, ends = [], []
    for rank in range(processes):
        here, there = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=_run, args=(there, str(recipe), changes, rank, processes, port), daemon=True)
        process.start()
        started.append(process)
        ends.append(here)
    failure, waiting = "", list(ends)
    while waiting and not failure:
        ready: list[Any] = wait(waiting, timeout=60)
        failure = "nobody is heard of any more" if not ready else ready[0].recv()
        waiting = [end for end in waiting if end not in ready[:1]]
    for process in started:
        if failure:
            process.kill()  # it would wait for the one that failed
        process.join()
    assert not failure, failure


def _run(end: Connection, recipe: str, changes: tuple[str, ...], rank: int, world: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if world > 1:
        os.environ.update({name: str(value) for name, value in place.items()})
    try:
        train(load_recipe(recipe, changes))
        end.send("")
    except BaseException:
        end.send(f"process {rank}:\n{traceback.format_exc()}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
