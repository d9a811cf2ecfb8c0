"""Results of experiments, kept in files by what determines them, so that no experiment runs twice.

An experiment is plain data: model, data checksums, rate, seed, versions. Its key is the hash of that. Processes share
the work by claiming experiments with file locks, which the system releases however a process ends: a killed experiment
is simply free again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from allyouneed import plugins
from allyouneed.errors import UserError
from allyouneed.files import checksum, sha256, write_text
from allyouneed.runtime.process import set_threads

Experiment = Mapping[str, Any]  # plain data
Result = dict[str, Any]  # plain data
Runner = Callable[[Experiment], Result]  # a function of a module, or functools.partial of one: processes import it
WAIT = 0.2  # seconds between looks at an experiment of another process


def versions() -> dict[str, Any]:
    """What else determines a result: versions of the libraries, and the plugins in use."""
    import torch

    named = {str(source): sha256(Path(source)) for source in plugins.sources() if Path(source).is_file()}
    try:
        own = version("allyouneed")
    except PackageNotFoundError:  # run from its sources
        own = ""
    return {"allyouneed": own, "torch": torch.__version__, "plugins": sorted(named.values())}


class ResultStore:
    """A folder of results: `<key>.json` holds an experiment and its result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be created: {error.strerror}; name another folder") from None

    def path(self, experiment: Experiment) -> Path:
        return self.folder / f"{checksum({'experiment': experiment})[:32]}.json"

    def get(self, experiment: Experiment) -> Result | None:
        """Its result; None if it has not finished."""
        try:
            found = json.loads(self.path(experiment).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path(experiment)}: cannot be read ({error}); delete it to run it again") from None
        return found["result"]

    def put(self, experiment: Experiment, result: Result) -> None:
        text = json.dumps({"experiment": experiment, "result": result}, indent=1, sort_keys=True, ensure_ascii=False)
        write_text(self.path(experiment), text + "\n")

    @contextmanager
    def claim(self, experiment: Experiment) -> Iterator[bool]:
        """Whether this process may run it now: no other one does. The lock ends with the block or the process."""
        path = self.path(experiment).with_suffix(".lock")
        with path.open("w") as handle:
            try:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                pass  # no file locks on this system
            except OSError:
                yield False
                return
            yield True
            with suppress(OSError):
                path.unlink()

    def run(
        self,
        experiments: Sequence[Experiment],
        runner: Runner,
        processes: int = 1,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Result]:
        """The results of these experiments, in their order; those that have not finished are run, by several processes
        if asked. `report`: how many are finished, of all."""
        missing, total = [one for one in experiments if self.get(one) is None], len(experiments)
        with _helpers(self.folder, missing, runner, min(processes, len(missing))):
            work(self, missing, runner, lambda left: report(total - left, total))
        found = [self.get(one) for one in experiments]
        assert None not in found
        return [one for one in found if one is not None]


def work(
    store: ResultStore,
    experiments: Sequence[Experiment],
    runner: Runner,
    report: Callable[[int], None] = lambda _: None,
) -> None:
    """Run what nobody else runs, in this order, and return when all are finished. `report`: how many are left."""
    left = list(experiments)
    report(len(left))
    while left:
        count = len(left)
        for one in list(left):
            if store.get(one) is None:
                with store.claim(one) as mine:
                    if not mine:
                        continue
                    if store.get(one) is None:  # another process may have finished it meanwhile
                        store.put(one, plain(runner(one)))
            left.remove(one)
            report(len(left))
        if len(left) == count:
            time.sleep(WAIT)


def plain(result: Mapping[str, Any]) -> Result:
    """The result as JSON reads it back, so that a fresh one equals a stored one; NaN and infinity are refused: what
    diverged is said, not stored as a number."""
    try:
        found: Result = json.loads(json.dumps(result, allow_nan=False))
    except ValueError:
        raise ValueError(f"a result is not finite: {result}") from None
    return found


def finite(value: float) -> float | None:
    """A number to be stored, None for one that is not finite."""
    return value if math.isfinite(value) else None


@contextmanager
def _helpers(folder: Path, experiments: Sequence[Experiment], runner: Runner, count: int) -> Iterator[None]:
    """Inside, this number of processes work, this one counted; each has its share of the machine."""
    if count < 2:
        yield
        return
    import multiprocessing

    import torch

    threads = torch.get_num_threads()
    context = multiprocessing.get_context("spawn")  # a model may have been loaded, whose threads a fork would lose
    shared = (folder, list(experiments), runner, plugins.sources(), max(1, threads // count))
    helpers = [context.Process(target=_help, args=(*shared, n), daemon=True) for n in range(1, count)]
    try:
        for helper in helpers:
            helper.start()
        set_threads(max(1, threads // count))
        yield
    finally:
        set_threads(threads)
        for helper in helpers:
            helper.terminate()
            helper.join()


def _help(
    folder: Path, experiments: list[Experiment], runner: Runner, sources: Sequence[str], threads: int, number: int
) -> None:
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends it
    set_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    plugins.load_all(sources)
    with suppress(UserError):  # the first process meets it too, and says it
        # it begins elsewhere, so that processes seldom ask for the same experiment
        work(ResultStore(folder), [*experiments[number:], *experiments[:number]], runner)
