"""The command that stores a model in fewer bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from allyouneed.cli.options import FILES, LANGUAGES, FromOption, JsonOption, option
from allyouneed.errors import UserError


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a model folder: ours, or a Hugging Face folder")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="the folder to write; it must not exist, or be empty")],
    *,
    to: Annotated[str, option("--to", metavar="int8|bf16|ternary", help="how its weights are stored")],
    data: Annotated[
        Path | None, option("--data", panel=FILES, metavar="FILE", help="examples to judge it by, before and after")
    ] = None,
    limit: Annotated[
        float,
        option("--limit", min=0, show_default=True, help="points of BLEU, accuracy or F1, per cent of perplexity"),
    ] = 0.5,
    force: Annotated[bool, option("--force", help="write it even if it loses more than --limit")] = False,
    as_json: JsonOption = False,
    into: Annotated[
        str | None, option("--into", panel=LANGUAGES, metavar="LANGUAGE", help="what the pairs of --data go into")
    ] = None,
    from_: FromOption = None,
) -> None:
    """Store a model in fewer bits; measure what that costs, and refuse if it is too much."""
    from allyouneed.cli.exchange import _free
    from allyouneed.lab.quantization import compare, quantized

    if data is None and (into is not None or from_ is not None):
        raise UserError("--into and --from say what the pairs of --data FILE are in; give --data, or leave them out")
    _free(out)
    before, after = quantized(model, to)
    found = compare(before, after, data, into, from_)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(found.tree(), ensure_ascii=False) if as_json else found.text())
    lost = f"it loses {found.loss:.2f} {found.unit}"
    if not found.loss <= limit:
        if not force:
            real = "" if data is not None else "judge it by real texts with --data FILE, or "
            raise UserError(
                f"{model}: as {to} {lost}, more than --limit {limit:g}; nothing is written ({real}write it anyway with "
                "--force)"
            )
        print(f"note: {lost}, more than --limit {limit:g}", file=sys.stderr)
    after.card = after.card and f"{after.card.rstrip()}\n\nStored as {to}: {lost} against the original.\n"
    after.save(out)
    print(f"{out}: stored as {to}", file=sys.stderr)
