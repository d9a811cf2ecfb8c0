"""`run` and `Popen` of `subprocess` for `[sys.executable, …]`, without paying for imports of seconds.

Such a process is forked from one that has imported torch and our packages and done nothing (processes.py). Streams,
environment, folder, signals and exit code are its own. Tests of how Python itself starts or ends use `subprocess`.
"""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from multiprocessing.connection import Connection
from subprocess import DEVNULL as DEVNULL
from subprocess import PIPE as PIPE
from typing import Any

import torch

from processes import SERVER
from waiting import PATIENCE


class Popen(subprocess.Popen[Any]):
    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        assert args[0] == sys.executable
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
        # a connection is how multiprocessing hands a file descriptor over
        streams = [
            Connection(os.dup(standard if given == -1 else given))
            for standard, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        for ours, theirs in ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite)):
            if ours != -1 and theirs != -1:
                os.close(theirs)
        settings = (list(map(str, args[1:])), dict(os.environ if env is None else env), str(cwd or os.getcwd()))
        self._process = SERVER.Process(target=_run, args=(*settings, streams), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.returncode = self._process.exitcode
        return self.returncode


def run(
    args: list[str], *, capture_output: bool = False, timeout: float = PATIENCE, **more: Any
) -> subprocess.CompletedProcess[Any]:
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **more) as process:
        try:
            found = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, *found)


def _run(args: list[str], env: dict[str, str], cwd: str, streams: list[Connection]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w")), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    while args[0] == "-W":  # which warnings are shown
        args = args[2:]
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")
