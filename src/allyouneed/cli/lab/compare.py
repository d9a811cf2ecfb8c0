"""The commands that find out which model suits your data, and at which size."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from allyouneed.cli import completion
from allyouneed.cli.messages import show_notes
from allyouneed.cli.options import argument, option
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.training.recipe.recipe import Recipe

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 60.0}
RECIPE = "recipe.yaml"
EVERY = 10.0  # seconds between lines of progress
RecipeOption = Annotated[
    list[str] | None,
    option("--set", metavar="KEY=VALUE", help="a key of the recipe for all models, e.g. batch.rows=4; repeatable"),
]


def compare(
    models: Annotated[
        list[str],
        argument(
            "MODEL…",
            "presets, YAML files of models, or recipes; the first sets the size",
            autocompletion=completion.models,
        ),
    ],
    data: Annotated[
        list[Path] | None,
        option("--data", "-d", metavar="FILE", help="files or folders of data, as for init; or a recipe; repeatable"),
    ] = None,
    *,
    output: Annotated[
        Path, option("--output", "-o", metavar="FOLDER", show_default=True, help="results and the report")
    ] = Path("runs/compare"),
    match: Annotated[
        str, option(metavar="parameters|flops|state|time", show_default=True, help="what is equal for all models")
    ] = "parameters",
    budget: Annotated[str | None, option(metavar="TIME", help="plan what fits into this time: 20m, 1h, 90s")] = None,
    seeds: Annotated[int, option(show_default=True, help="runs of each model at its rate")] = 3,
    steps: Annotated[int | None, option(min=1, help="updates of a run; default: 600, on a GPU 3,000")] = None,
    width: Annotated[int | None, option(min=16, help="of the first model; default: 128 on a CPU, 512 on a GPU")] = None,
    blocks: Annotated[int | None, option(min=1, help="of each stack; default: 4 on a CPU, 8 on a GPU")] = None,
    rates: Annotated[
        str, option(metavar="R,R,…", show_default=True, help="learning rates of the sweep")
    ] = "0.001,0.0032,0.01",
    processes: Annotated[int, option(min=1, show_default=True, help="processes that share the runs")] = 1,
    task: Annotated[str | None, option("--task", metavar="NAME", help="the task, if not the likeliest")] = None,
    changes: RecipeOption = None,
) -> None:
    """Find out which model suits your data: train several fairly, and write a report with a recommendation.

    All read the same tokens in the same order. Sizes are solved for, learning rates found by one rule, differences
    judged by intervals over seeds and examples. Run the same command again to resume; what has run is not run again.
    """
    from allyouneed.lab.comparison.compare import ComparisonSettings
    from allyouneed.lab.comparison.compare import compare as run
    from allyouneed.lab.comparison.report import summary, write_report
    from allyouneed.lab.comparison.sizes import MATCHES
    from allyouneed.lab.rates import RateRule

    if match not in MATCHES:
        raise UserError(f"--match {match}: expected {', '.join(MATCHES)}")
    found, recipes = _contenders(models)
    settings = ComparisonSettings(
        match=match,
        seeds=seeds,
        steps=steps,
        budget=None if budget is None else _seconds(budget),
        width=width,
        blocks=blocks,
        processes=processes,
        rule=RateRule(_rates(rates)),
    )
    write_recipe(output, data or recipes[:1], task, changes or ())
    with resumable():
        compared = run(found, output, settings, lambda text: show_notes([text]), counter())
    page = write_report(compared, output, _command("compare"))
    print(summary(compared))
    print(f"\nthe report is in {page}")


def scaling(
    model: Annotated[
        str, argument("MODEL", "a preset, a YAML file of a model, or a recipe", autocompletion=completion.models)
    ],
    data: Annotated[
        list[Path] | None,
        option("--data", "-d", metavar="FILE", help="files or folders of data, as for init; or a recipe; repeatable"),
    ] = None,
    *,
    output: Annotated[
        Path, option("--output", "-o", metavar="FOLDER", show_default=True, help="results and the report")
    ] = Path("runs/scaling"),
    width: Annotated[int, option(min=8, show_default=True, help="of the smallest model")] = 32,
    sizes: Annotated[int, option(min=2, show_default=True, help="models; each is √2 times as wide as the last")] = 5,
    blocks: Annotated[int, option(min=1, show_default=True, help="of each stack")] = 2,
    steps: Annotated[int, option(min=1, show_default=True, help="updates of the shortest runs")] = 50,
    lengths: Annotated[
        int, option(min=2, show_default=True, help="lengths of training; each is twice as long as the one before")
    ] = 4,
    compute: Annotated[
        str | None, option(metavar="FLOPS,…", help="budgets to plan for, e.g. 1e15,1e16; default: around the ladder's")
    ] = None,
    rates: Annotated[
        str, option(metavar="R,R,…", show_default=True, help="learning rates of the sweep")
    ] = "0.0032,0.01,0.032",
    processes: Annotated[int, option(min=1, show_default=True, help="processes that share the runs")] = 1,
    task: Annotated[str | None, option("--task", metavar="NAME", help="the task, if not the likeliest")] = None,
    changes: RecipeOption = None,
) -> None:
    """Train a ladder of small models, fit how the loss falls with size and data, and print the best size for a budget.

    The law is L(N, D) = E + A/N^α + B/D^β, with intervals. Run the same command again to resume.
    """
    from allyouneed.files import write_text
    from allyouneed.lab.rates import RateRule
    from allyouneed.lab.scaling import climb, page, text, widths_of

    budgets = () if compute is None else _budgets(compute)
    found, recipes = _contenders([model], least=1)
    write_recipe(output, data or recipes, task, changes or ())
    ((name, tree),) = found.items()
    with resumable():
        ladder = climb(
            name,
            tree,
            output,
            widths_of(width, sizes),
            [steps * 2**n for n in range(lengths)],
            blocks,
            budgets,
            processes,
            RateRule(_rates(rates)),
            counter(),
        )
    write_text(output / "scaling.html", page(ladder, _command("scaling")))
    print(text(ladder))
    print(f"\nthe report is in {output / 'scaling.html'}")


def _command(name: str) -> str:
    """The command line that this process runs."""
    return shlex.join(["allyouneed", *sys.argv[1:]]) if sys.argv[1:2] == [name] else f"allyouneed {name} …"


def _budgets(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < one < 1e40 for one in found):
        raise UserError(f"--compute {text}: expected numbers of FLOPs, separated by commas: 1e15,1e16")
    return found


@contextmanager
def resumable() -> Iterator[None]:
    """Says after Ctrl-C that nothing finished is lost."""
    try:
        yield
    except KeyboardInterrupt:
        show_notes(["stopped; finished runs are kept, run the same command again to resume"])
        raise


def counter() -> Callable[[int, int], None]:
    """Shows how many runs are finished, every ten seconds."""
    shown = time.monotonic()

    def count(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > EVERY:
            shown = time.monotonic()
            show_notes([f"{done} of {total} runs"])

    return count


def _contenders(names: Sequence[str], least: int = 2) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Models by name, and the recipes among the arguments."""
    from allyouneed.config import read_tree
    from allyouneed.training.recipe.file import load_recipe
    from allyouneed.training.recipe.recipe import model_named

    found: dict[str, dict[str, Any]] = {}
    recipes: list[Path] = []
    for given in names:
        name = Path(given).stem if given.endswith((".yaml", ".yml", ".json")) else given
        if name in found:
            raise UserError(f"{given}: there are two models named {name}; rename a file")
        tree = read_tree(given) if name != given else None
        if isinstance(tree, dict) and "data" in tree:
            recipe = load_recipe(given)
            if recipe.start is not None:
                raise UserError(f"{given}: fine-tunes a model; recipes that are compared train new ones (model:)")
            found[name] = recipe.model_tree()
            recipes.append(Path(given))
        else:
            found[name] = model_named(given)
    if len(found) < least:
        raise UserError("name at least two models; `allyouneed models` lists the presets")
    return found, recipes


def write_recipe(output: Path, data: Sequence[Path], task: str | None, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in the output folder: of a recipe, or proposed for files of data. A folder with one of other data is
    refused."""
    import yaml
    from rich.console import Console

    from allyouneed.apps.propose import propose
    from allyouneed.config import tree_of
    from allyouneed.files import write_text
    from allyouneed.training.recipe.file import load_recipe

    if not data:
        raise UserError("give your data with --data FILE, or name a recipe, whose data is used")
    if output.is_file():
        raise UserError(f"{output}: is a file; name a folder")
    kept, new = output / RECIPE, output / f".{RECIPE}"
    if len(data) == 1 and data[0].suffix in (".yaml", ".yml"):
        source = load_recipe(data[0], changes)
    else:
        propose(data, task, new, force=True, console=Console(quiet=True))
        source = load_recipe(new, changes)
        new.unlink()
    tree = tree_of(source) | {"model": source.model_tree(), "set": [], "output": "train"}
    tree.pop("start")  # models that are compared are new
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)
    if kept.exists() and kept.read_text(encoding="utf-8") != text:
        raise UserError(f"{output}: holds a comparison on other data or settings of it; name another --output")
    output.mkdir(parents=True, exist_ok=True)
    write_text(kept, text)
    return load_recipe(kept)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UserError(f"--budget {text}: expected a time such as 20m, 1h or 90s")
    return float(found[1]) * SECONDS[found[2]]


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if len(found) < 3 or found[0] <= 0 or found[-1] >= 1e3:
        raise UserError(f"--rates {text}: expected at least three rates, separated by commas: 0.001,0.0032,0.01")
    return found
