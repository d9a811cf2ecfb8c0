"""Options that several commands share, and groups of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from allyouneed.cli.completion import folders, words

# the panels of `allyouneed --help`
USE, TRAIN, LOOK, EXCHANGE = "Use a model", "Train and measure", "Look inside", "Exchange with others"
# and of a command's own help
FILES, LANGUAGES, SEARCH, SAMPLING = "Files", "Multilingual models", "Search", "Sampling"


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


def option(*names: str, panel: str = "Options", show_default: bool = False, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=show_default, **more)


MODEL = ("--model", "-m")
SetOption = Annotated[
    list[str] | None, option("--set", metavar="KEY=VALUE", help="override a key, e.g. width=256; repeatable")
]
PluginOption = Annotated[
    list[str] | None,
    option("--plugin", metavar="FILE|MODULE", help="import parts from a .py file or a module; repeatable"),
]
JsonOption = Annotated[bool, option("--json", help="print JSON")]
ModelOption = Annotated[
    Path,
    option(*MODEL, metavar="FOLDER", autocompletion=folders, help="a model folder: ours, Hugging Face's or translator"),
]
QuietOption = Annotated[bool, option("--quiet", "-q", help="print no progress and no notes, only errors")]
TranslatorOption = Annotated[
    Path | None,
    option(*MODEL, metavar="FOLDER", autocompletion=folders, help="a model folder; default: the bundled translator"),
]
DeviceOption = Annotated[
    str,
    option(
        "--device",
        metavar="auto|cpu|cuda",
        autocompletion=words("auto", "cpu", "cuda"),
        show_default=True,
        help="auto: a GPU if there is one; int8 models: the CPU",
    ),
]
DtypeOption = Annotated[
    str | None,
    option(
        "--dtype",
        metavar="float32|bfloat16|float16",
        autocompletion=words("float32", "bfloat16", "float16"),
        help="precision of the weights; default: as stored",
    ),
]
InputOption = Annotated[
    Path | None,
    option("--input", "-i", panel=FILES, metavar="FILE", help="read one text per line (.gz, .zst too), or a folder"),
]
OutputOption = Annotated[
    Path | None,
    option("--output", "-o", panel=FILES, metavar="FILE", help="write here; appears when complete (.gz, .zst too)"),
]
ForceOption = Annotated[bool, option("--force", panel=FILES, help="overwrite an existing output")]
RestartOption = Annotated[bool, option("--restart", panel=FILES, help="discard an interrupted run instead of resuming")]
ShardOption = Annotated[
    str | None, option("--shard", panel=FILES, metavar="I/N", help="do part I of N: lines of a file, files of a folder")
]
WholeOption = Annotated[bool, option("--whole", panel=FILES, help="read the input as one text, line breaks included")]
ListOption = Annotated[
    Path | None,
    option("--input", "-i", panel=FILES, metavar="FILE", help="read paths from a file, one per line, or a folder"),
]
SpecialsOption = Annotated[bool, option("--specials", help="parse special tokens in the text")]
TopOption = Annotated[int | None, option("--top", min=1, help="show the N most likely, with probabilities")]

ToOption = Annotated[str | None, option("--to", panel=LANGUAGES, metavar="LANGUAGE", help="target language")]
FromOption = Annotated[str | None, option("--from", panel=LANGUAGES, metavar="LANGUAGE", help="source language")]

MethodOption = Annotated[
    str | None,
    option(
        panel=SEARCH,
        metavar="beam|greedy|sample",
        autocompletion=words("beam", "greedy", "sample"),
        help="decoding method",
    ),
]
BeamOption = Annotated[int | None, option(min=1, panel=SEARCH, help="beam width; 1 is greedy")]
BestOption = Annotated[int | None, option(min=1, panel=SEARCH, help="print the N best results, with scores")]
PenaltyOption = Annotated[float | None, option(panel=SEARCH, help="length penalty; higher favours longer texts")]
LengthOption = Annotated[int | None, option("--max-length", min=1, panel=SEARCH, help="at most N new tokens")]
LeastOption = Annotated[int | None, option("--min-length", min=0, panel=SEARCH, help="at least N new tokens")]
RepetitionOption = Annotated[
    float | None, option("--repetition-penalty", panel=SEARCH, help="above 1: penalize tokens already generated")
]
LoopsOption = Annotated[
    int | None, option("--loops", min=0, panel=SEARCH, help="stop after N repetitions in a row (default 8); 0: never")
]
NoRepeatOption = Annotated[
    int | None, option("--no-repeat", min=1, panel=SEARCH, help="never repeat an n-gram of this many tokens")
]
IterationsOption = Annotated[
    int | None, option("--iterations", min=1, panel=SEARCH, help="rounds of mask-predict (default 10)")
]
StopOption = Annotated[
    list[str] | None, option("--stop", panel=SEARCH, metavar="TEXT", help="stop before this text; repeatable")
]

UnlimitedOption = Annotated[
    int | None,
    option(
        "--unlimited",
        min=1,
        panel=SEARCH,
        metavar="K",
        help="read texts of any length; each head attends to the K nearest source tokens (Unlimiformer)",
    ),
]

DraftOption = Annotated[
    str | None,
    option(
        "--draft",
        panel=SEARCH,
        metavar="FOLDER|lookup",
        help="speculative decoding with a smaller model or prompt lookup: same results, faster; not for beams",
    ),
]
AheadOption = Annotated[int | None, option(min=1, panel=SEARCH, help="tokens to draft per step (default 4; lookup 8)")]

TemperatureOption = Annotated[float | None, option(panel=SAMPLING, help="softmax temperature; higher is more random")]
TopKOption = Annotated[int | None, option(panel=SAMPLING, help="sample from the k most likely tokens")]
TopPOption = Annotated[float | None, option(panel=SAMPLING, help="sample from the smallest set of probability p")]
MinPOption = Annotated[
    float | None, option(panel=SAMPLING, help="drop tokens less likely than p times the most likely one")
]
SeedOption = Annotated[int | None, option(panel=SAMPLING, help="random seed; the same seed gives the same samples")]


# --- groups of options: a command takes a group as one parameter (commands.py) --------------------------------


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    device: DeviceOption = "auto"
    dtype: DtypeOption = None


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Files that are read and written line by line."""

    input_: InputOption = None
    output: OutputOption = None
    force: ForceOption = False
    restart: RestartOption = False
    shard: ShardOption = None


@dataclass(frozen=True, kw_only=True)
class TextFileOptions(FileOptions):
    """With `--whole`, for commands whose texts may have several lines."""

    whole: WholeOption = False


@dataclass(frozen=True, kw_only=True)
class PathFileOptions(FileOptions):
    """The lines of the input are paths."""

    input_: ListOption = None


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How tokens are chosen; None: as the model's folder says."""

    method: MethodOption = None
    beam: BeamOption = None
    length_penalty: PenaltyOption = None
    temperature: TemperatureOption = None
    top_k: TopKOption = None
    top_p: TopPOption = None
    min_p: MinPOption = None
    seed: SeedOption = None

    def given(self) -> dict[str, Any]:
        """The options that were given, `draft` as the name that was given."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) not in (None, [])}


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(SearchOptions):
    """Options of every command that generates text."""

    best: BestOption = None
    loops: LoopsOption = None
    draft: DraftOption = None
    ahead: AheadOption = None


@dataclass(frozen=True, kw_only=True)
class TranslateOptions(DecodingOptions):
    iterations: IterationsOption = None
    unlimited: UnlimitedOption = None


@dataclass(frozen=True, kw_only=True)
class WritingOptions(DecodingOptions):
    """Besides: of commands that write texts of any length."""

    max_length: LengthOption = None
    min_length: LeastOption = None
    repetition_penalty: RepetitionOption = None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(WritingOptions):
    stop: StopOption = None


@dataclass(frozen=True, kw_only=True)
class Seq2SeqOptions(WritingOptions):
    no_repeat: NoRepeatOption = None
    unlimited: UnlimitedOption = None
