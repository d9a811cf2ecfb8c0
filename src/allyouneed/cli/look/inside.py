"""`allyouneed look walk|mixing|why|what-if|inside|lessons|… -o page.html`: views of one input as an offline file."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from allyouneed.cli.completion import words
from allyouneed.cli.loading import load_predictor
from allyouneed.cli.look import page_command
from allyouneed.cli.look.views import InputArgument, PageOption, input_fields, save_page
from allyouneed.cli.messages import warnings_as_notes
from allyouneed.cli.options import ComputeOptions, FromOption, ToOption, TranslatorOption, argument, option
from allyouneed.errors import UserError

EXAMPLE = "机器学习很有趣"
TargetOption = Annotated[
    str | None, option("--target", metavar="TEXT", help="follow this answer instead of the model's own")
]


@dataclass(frozen=True, kw_only=True)
class InsideOptions:
    """What a view of one input needs besides the input."""

    model: TranslatorOption = None
    to: ToOption = None
    source: FromOption = None
    target: TargetOption = None


def _look(
    names: tuple[str, ...], text: str, output: Path, inside: InsideOptions, compute: ComputeOptions, **request: Any
) -> None:
    from allyouneed.apps.inspect.notebook import INSIDE
    from allyouneed.apps.inspect.offline import check_page_path, collect, view_model
    from allyouneed.models import TRANSLATOR

    check_page_path(output)
    predictor = load_predictor(inside.model or Path(TRANSLATOR), compute)
    given = {field.name: getattr(inside, field.name) for field in fields(inside)[1:]} | request
    asked = input_fields(predictor, text) | {name: value for name, value in given.items() if value is not None}
    with warnings_as_notes():
        save_page(collect(view_model(predictor), names, asked, lenient=names == INSIDE), output)


@page_command("inside")
def inside(text: InputArgument, *, output: PageOption, inside: InsideOptions, compute: ComputeOptions) -> None:
    """All views of one input in one file: walk, truth, mixing, why, what if."""
    from allyouneed.apps.inspect.notebook import INSIDE

    _look(INSIDE, text, output, inside, compute)


@page_command("lessons")
def lessons(
    text: Annotated[str, argument("TEXT", "the sentence that the lessons are about")] = EXAMPLE,
    *,
    output: PageOption,
    inside: InsideOptions,
    compute: ComputeOptions,
) -> None:
    """Write the lessons: short pages through the views, in the order of "Attention Is All You Need"."""
    _look(("lessons",), text, output, inside, compute)


@page_command("walk")
def walk(
    text: InputArgument,
    *,
    output: PageOption,
    inside: InsideOptions,
    position: Annotated[int | None, option(min=0, help="token whose numbers are shown first")] = None,
    compute: ComputeOptions,
) -> None:
    """Walk through the model box by box: formulas, shapes, real numbers; decoding step by step."""
    _look(("walk", "truth"), text, output, inside, compute, position=position)


@page_command("mixing")
def mixing(
    text: InputArgument,
    *,
    output: PageOption,
    inside: InsideOptions,
    site: Annotated[str | None, option(metavar="NAME", help="the mixer shown first, e.g. decoder.0.cross")] = None,
    head: Annotated[int | None, option(min=0, help="the head shown first")] = None,
    compute: ComputeOptions,
) -> None:
    """Show who reads whom: every token mixer as a matrix, per layer and head."""
    _look(("mixing",), text, output, inside, compute, site=site, head=head)


@page_command("why")
def why(
    text: InputArgument,
    *,
    output: PageOption,
    inside: InsideOptions,
    answer: Annotated[int | None, option(min=0, help="number of the word to explain, from 0")] = None,
    method: Annotated[
        str | None,
        option(
            metavar="causal|attention|rollout|logits",
            autocompletion=words("causal", "attention", "rollout", "logits"),
            help="default: causal",
        ),
    ] = None,
    unit: Annotated[
        str | None,
        option(
            metavar="token|head|sublayer|block",
            autocompletion=words("token", "head", "sublayer", "block"),
            help="what is left out; default: token",
        ),
    ] = None,
    compute: ComputeOptions,
) -> None:
    """Explain a word of the answer: what it rests on, and after which block the model knew it."""
    _look(("why",), text, output, inside, compute, answer=answer, method=method, unit=unit)


@page_command("what-if")
def what_if(
    text: InputArgument,
    *,
    output: PageOption,
    inside: InsideOptions,
    mask: Annotated[list[int] | None, option(min=0, help="leave out this token; repeatable")] = None,
    stack: Annotated[str | None, option(metavar="NAME", help="stack of --mask and --place, e.g. decoder")] = None,
    ablate: Annotated[
        list[str] | None,
        option(metavar="NAME", help="switch off a block, sub-layer or head, e.g. 'decoder.0.mixer.heads[3]'"),
    ] = None,
    place: Annotated[str | None, option(metavar="N,N,…", help="other positions of the tokens")] = None,
    edit: Annotated[
        list[str] | None, option(metavar="SITE[I,J]=NUMBER", help="set a number, e.g. 'encoder.0[2,5]=0'; repeatable")
    ] = None,
    patch: Annotated[
        list[str] | None, option(metavar="SITE=TEXT", help="take a value from the run of another text; repeatable")
    ] = None,
    rewrite: Annotated[bool, option("--rewrite", help="decode the answer again under the change")] = False,
    compute: ComputeOptions,
) -> None:
    """Change something inside the model and see what becomes of the answer; without options, try tokens and blocks."""
    changes = {
        "mask": mask,
        "stack": stack,
        "ablate": ablate,
        "place": None if place is None else _numbers(place, "--place"),
        "edit": [_edit(one) for one in edit] if edit else None,
        "patch": [_patch(one) for one in patch] if patch else None,
        "rewrite": rewrite or None,
    }
    _look(("walk", "what_if"), text, output, inside, compute, **changes)


def _numbers(text: str, what: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise UserError(f"{what} {text}: expected integers, e.g. 0,1,2") from None


def _edit(text: str) -> dict[str, Any]:
    found = re.fullmatch(r"([\w.@]+)\[([-\d,\s]+)\]=([^=]+)", text)
    if found is None:
        raise UserError(f"--edit {text}: expected SITE[I,J]=NUMBER, e.g. encoder.0[2,5]=0")
    try:
        number = float(found[3])
    except ValueError:
        raise UserError(f"--edit {text}: {found[3]!r} is not a number") from None
    return {"site": found[1], "at": _numbers(found[2], "--edit"), "number": number}


def _patch(text: str) -> dict[str, Any]:
    site, given, other = text.partition("=")
    if not given or not site or not other:
        raise UserError(f"--patch {text}: expected SITE=TEXT")
    return {"site": site, "text": other}
