"""The command that quantizes a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from allyouneed.cli.messages import created_folders_as_note, show_notes, show_status
from allyouneed.cli.options import FILES, LANGUAGES, FromOption, JsonOption, argument, option
from allyouneed.errors import UserError


def quantize(
    model: Annotated[Path, argument("MODEL", "a model folder: ours or Hugging Face's")],
    out: Annotated[Path, argument("OUT", "the folder to write; new or empty")],
    *,
    to: Annotated[str, option("--to", metavar="int8|bf16|ternary|ternary-int8", help="format of the weights")],
    data: Annotated[
        Path | None, option("--data", panel=FILES, metavar="FILE", help="examples to evaluate it on, before and after")
    ] = None,
    limit: Annotated[
        float,
        option(
            "--limit",
            min=0,
            show_default=True,
            help="allowed loss: points of BLEU, accuracy or F1, per cent of perplexity",
        ),
    ] = 0.5,
    force: Annotated[bool, option("--force", help="write it even if the loss exceeds --limit")] = False,
    as_json: JsonOption = False,
    into: Annotated[
        str | None, option("--into", panel=LANGUAGES, metavar="LANGUAGE", help="target language of the pairs of --data")
    ] = None,
    from_: FromOption = None,
) -> None:
    """Quantize a model; measure the loss of quality, and refuse if it is too large."""
    from allyouneed.cli.import_export import check_free
    from allyouneed.lab.quantization import compare, quantized

    if data is None and (into is not None or from_ is not None):
        raise UserError("--into and --from require --data FILE; add it, or remove them")
    check_free(out)
    before, after = quantized(model, to)
    found = compare(before, after, data, into, from_)
    show_notes(found.notes)
    print(json.dumps(found.tree(), ensure_ascii=False) if as_json else found.text())
    loss = f"it loses {found.loss:.2f} {found.unit}"
    if not found.loss <= limit:
        if not force:
            hint = "" if data is not None else "evaluate it on real texts with --data FILE, "
            raise UserError(
                f"{model}: as {to} {loss}, more than --limit {limit:g}; nothing was written ({hint}--force writes it "
                "anyway)"
            )
        show_notes([f"{loss}, more than --limit {limit:g}"])
    after.card = after.card and f"{after.card.rstrip()}\n\nStored as {to}: {loss} against the original.\n"
    with created_folders_as_note(out):
        after.save(out)
    show_status(f"{out}: stored as {to}")
