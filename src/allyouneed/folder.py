"""A model is a readable folder: config.json, model.safetensors, tokenizer.json, a model card. No pickle, no code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, StrictInt, StrictStr
from torch import Tensor, nn

from allyouneed import plugins
from allyouneed.config import Config, iter_parts, parse, tree_of
from allyouneed.data.files.mapped import MappedFile, release_pages
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.files import sha256, write_folder
from allyouneed.files.reading import MAX_JSON_BYTES, file_in, has_file, parse_json, read_bytes, read_text
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize, stored_as
from allyouneed.nn.models.weights import assign_weights, cast_weights, dtype_problem, meta_model, named_tensors
from allyouneed.tasks.translation.confidence import Confidence

if TYPE_CHECKING:
    from allyouneed.data.shortlist import Shortlist

FORMAT = 1
WEIGHTS = "model.safetensors"
UNUSED = "unused.safetensors"  # weights of an imported model that ours does not use, kept for export
ORIGINALS = "original"
LANGUAGES = "languages.json"
SHORTLIST = "shortlist.safetensors"
CARD = "README.md"
MAX_LAYERS = 1024  # a config may declare this many layers with fewer tensors: layers may share weights
MAX_TOKENS = 1 << 31
REWRITING = ("seq2seq", "summarisation", "correction")  # tasks that write one text from another with the same model
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RequiredPart(Config):
    slot: StrictStr
    kind: StrictStr


class RequiredPlugin(Config):
    name: StrictStr
    sha256: StrictStr
    parts: list[RequiredPart]


class FolderTask(Config):
    """The kind of the task; its options are read by the task's predictor."""

    model_config = ConfigDict(extra="allow")

    kind: StrictStr


class FolderConfig(Config):
    """config.json of a model folder, but for `model`, which is a config of its own. A later version may add keys."""

    model_config = ConfigDict(extra="ignore")

    format: Literal[1]
    model: dict[str, Any]
    task: FolderTask
    decoding: dict[str, Any]
    max_tokens: Annotated[StrictInt, Field(gt=0, lt=MAX_TOKENS)]
    directions: list[tuple[StrictStr | None, StrictStr]]
    labels: list[StrictStr] = Field(default_factory=list)
    files: dict[str, Any] = Field(default_factory=dict)
    retrieval: dict[str, StrictStr] = Field(default_factory=dict)
    tokenizer_hash: StrictStr | None
    sha256: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    stored: Literal["int8", "bf16", "ternary", "ternary-int8"] | None = None
    together: Annotated[StrictInt, Field(ge=0, lt=MAX_TOKENS)] | None = None
    confidence: Confidence | None = None
    plugins: list[RequiredPlugin] = Field(default_factory=list)
    origin: dict[str, Any] = Field(default_factory=dict)
    notes: list[StrictStr] = Field(default_factory=list)


@dataclass
class Folder:
    """The content of a model folder."""

    model: nn.Module
    vocabularies: Vocabularies | None  # None: it reads no text, or only token ids
    task: dict[str, Any] = field(default_factory=lambda: {"kind": "translation"})
    decoding: dict[str, Any] = field(default_factory=dict)  # default decoding options: beam, length penalty
    max_tokens: int = 256  # length of the longest training example
    directions: list[tuple[str | None, str]] = field(
        default_factory=list
    )  # (from, to), where the training data names them
    labels: list[str] = field(default_factory=list)  # class or tag names, in the order of the scores
    files: dict[str, Any] = field(default_factory=dict)  # how its training data was read: columns, keys
    retrieval: dict[str, str] = field(default_factory=dict)  # path of the index that it retrieves from
    card: str = ""
    path: Path | None = None
    origin: dict[str, Any] = field(default_factory=dict)  # of an imported model: family and original config
    notes: list[str] = field(default_factory=list)  # for the user, e.g. features of the original that are missing here
    unused: Mapping[str, Tensor] = field(default_factory=dict)  # weights of the original that ours does not use
    originals: dict[str, bytes] = field(
        default_factory=dict
    )  # small files of the original, unchanged, by name: tokenizers, …
    detector: LanguageDetector | None = None  # language detector, for multilingual models
    together: int | None = None  # most tokens of a line that is translated whole; None: the translator's default
    confidence: Confidence | None = None  # how probable it is that a translation is acceptable
    shortlist: Shortlist | None = None  # the tokens that the translation of a source may have

    def __post_init__(self) -> None:
        if self.vocabularies is not None:
            self.vocabularies = self.vocabularies.with_types(token_types(getattr(self.model, "config", None)))

    @property
    def tokenizers(self) -> Vocabularies:
        """The vocabularies; an error if there are none."""
        if self.vocabularies is None:
            raise UserError(f"{self.path or 'the model'}: has no tokenizer; give it token ids instead of texts")
        return self.vocabularies

    def save(self, path: Path | str) -> None:
        """Write the folder under a hidden name and rename it when it is complete."""
        config: Model = self.model.config  # type: ignore[assignment]

        def write(folder: Path) -> None:
            from safetensors.torch import save_file

            save_file(own_tensors(self.model), folder / WEIGHTS)
            if self.unused:
                save_file({name: tensor.contiguous() for name, tensor in self.unused.items()}, folder / UNUSED)
            if self.vocabularies is not None:
                self.vocabularies.save(folder)
            if self.detector is not None:
                self.detector.save(folder / LANGUAGES)
            if self.shortlist is not None:
                self.shortlist.save(folder / SHORTLIST)
            for name, content in self.originals.items():
                (folder / ORIGINALS).mkdir(exist_ok=True)
                (folder / ORIGINALS / name).write_bytes(content)
            (folder / CARD).write_text(self.card or f"# A model of kind {tree_of(config)['kind']}\n", encoding="utf-8")
            written = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
            written.remove(CARD)
            about = {
                "format": FORMAT,
                "task": self.task,
                "decoding": self.decoding,
                "max_tokens": self.max_tokens,
                "directions": self.directions,
                "labels": self.labels,
                "files": self.files,
                **({"retrieval": self.retrieval} if self.retrieval else {}),
                "tokenizer_hash": None if self.vocabularies is None else self.vocabularies.hash,
                "sha256": {name: sha256(folder / name) for name in written},
                **({"stored": stored} if (stored := stored_as(self.model)) else {}),
                **({} if self.together is None else {"together": self.together}),
                **({} if self.confidence is None else {"confidence": tree_of(self.confidence)}),
                **({"plugins": needed} if (needed := plugins.required_by(iter_parts(config))) else {}),
                "model": tree_of(config),
            }
            about |= {"origin": self.origin, "notes": self.notes} if self.origin else {}
            (folder / "config.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", "utf-8")

        write_folder(Path(path), write)
        self.path = Path(path)

    @classmethod
    def load(
        cls,
        path: Path | str,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        as_stored: bool = False,
    ) -> Folder:
        """Read a folder; checksums are verified, and every weight is checked against the config.

        Weights are memory-mapped and keep their precision unless `dtype` is given. Mixed precisions become the most
        frequent one, unless `as_stored` (for writing the folder again, not for computing).
        """
        path = Path(path)
        about = read_about(path)
        problems = []
        for name, expected in about["sha256"].items():
            if not has_file(path, name):
                problems.append(f"{path}: {name} is missing; the folder is incomplete, copy it again")
            elif sha256(file_in(path, name)) != expected:
                problems.append(f"{path / name}: damaged (checksum differs from config.json); copy it again")
        if problems:
            raise UserError("\n".join(problems))
        config = parse(Model, about["model"], f"{path / 'config.json'}: model")  # type: ignore[type-abstract]
        shortlist = None
        if SHORTLIST in about["sha256"]:
            from allyouneed.data.shortlist import Shortlist

            shortlist = Shortlist.load(path / SHORTLIST, config.vocabs)
        vocabularies = None if about["tokenizer_hash"] is None else Vocabularies.load(path)
        if vocabularies is not None:
            if vocabularies.hash != about["tokenizer_hash"]:
                raise UserError(f"{path}: tokenizer.json is not the one this model was trained with")
            check_vocabularies(path, vocabularies, config)
        stored, precision = about.get("stored"), as_dtype(dtype)
        if stored and precision not in (None, torch.float32):
            raise UserError(f"{path}: its weights are quantized ({stored}) and cannot be converted; remove the dtype")
        file_in(path, WEIGHTS)
        model = _load_model(config, path / WEIGHTS, device, precision, stored)
        check_finite(str(path / WEIGHTS), model)
        if not as_stored:
            cast_weights(model)
        return cls(
            model,
            vocabularies,
            about["task"],
            about["decoding"],
            about["max_tokens"],
            [(pair[0], pair[1]) for pair in about["directions"]],
            about.get("labels", []),
            about.get("files", {}),
            about.get("retrieval", {}),
            read_card(path),
            path,
            about.get("origin", {}),
            [*about.get("notes", []), *plugins.check_required(about.get("plugins", []), str(path))],
            MappedFile(path / UNUSED) if UNUSED in about["sha256"] else {},
            {
                Path(name).name: read_bytes(path, name)
                for name in about["sha256"]
                if Path(name).parent == Path(ORIGINALS)
            },
            LanguageDetector.load(path / LANGUAGES) if LANGUAGES in about["sha256"] else None,
            about.get("together"),
            None
            if about.get("confidence") is None
            else parse(Confidence, about["confidence"], f"{path / 'config.json'}: confidence"),
            shortlist,
        )


def as_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by its name; None (as stored) stays None."""
    if isinstance(name, str) and name not in DTYPES:
        raise UserError(f"dtype {name!r}: expected {', '.join(DTYPES)}")
    return DTYPES[name] if isinstance(name, str) else name


def check_vocabularies(path: Path, vocabularies: Vocabularies, config: Model) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings, or with ids that have none: ids index the
    embedding and the scores."""
    sizes, types = config.vocabs, token_types(config)
    vocabularies = vocabularies.with_types(types)
    for side, tokenizer in (("source", vocabularies.source), ("target", vocabularies.target)):
        if sizes is None:
            continue
        rows = getattr(sizes, side)
        if tokenizer.size > rows:
            raise UserError(f"{path}: the {side} tokenizer has {tokenizer.size:,} tokens, the model {rows:,}")
        wrong = sorted(number for number in tokenizer.used_ids if not 0 <= number < rows)
        if wrong:
            listed = ", ".join(map(str, wrong[:5])) + (", …" if len(wrong) > 5 else "")
            raise UserError(
                f"{path}: the {side} tokenizer uses the ids {listed}, the model has {rows:,} tokens; they do not "
                "belong together"
            )
        used = tokenizer.template.used_types
        if types is not None and not 0 <= min(used) <= max(used) < types:
            raise UserError(f"{path}: the {side} tokenizer uses token types up to {max(used)}, the model has {types}")


def token_types(config: Any) -> int | None:
    """Token types that the model has vectors for; None: it reads none."""
    return getattr(getattr(config, "embed", None), "types", None)


def check_finite(where: str, model: nn.Module) -> None:
    """Refuse weights that contain NaN or infinity: every result would."""
    wrong = []
    for name, tensor in named_tensors(model).items():
        if tensor.is_floating_point() and tensor.numel():
            least, most = torch.aminmax(tensor.detach())
            if not bool(torch.isfinite(least) & torch.isfinite(most)):
                wrong.append(f"{name}: contains NaN or infinity")
            release_pages(tensor)
    if wrong:
        raise UserError(f"{where}: damaged weights; get the model again\n  " + "\n  ".join(wrong))


def read_card(path: Path) -> str:
    """The model card; empty where there is none."""
    return read_bytes(path, CARD).decode("utf-8", errors="replace") if has_file(path, CARD) else ""


def _load_model(
    config: Model, file: Path, device: str | torch.device, dtype: torch.dtype | None, quantized: str | None = None
) -> nn.Module:
    """The model with the weights of a file, without a second copy. `quantized`: the format of the weights."""
    stored = MappedFile(file)
    check_size(config, stored)
    model = meta_model(config)
    model = model if quantized is None else quantize(model, quantized, set(stored))
    wanted = named_tensors(model)
    check_fit(file, stored, wanted, left_over=sorted(set(stored) - set(wanted)))
    if quantized is not None and quantized.endswith("int8"):
        dtype = torch.float32  # of steps and of all that is not quantized, whatever the file says
    found = ((name, stored[name]) for name in wanted)
    assign_weights(model, {n: tensor.to(device, dtype if tensor.is_floating_point() else None) for n, tensor in found})
    return model.eval()


def check_size(config: Model, stored: MappedFile) -> None:
    """Refuse a config of far more layers or parameters than the file holds, before anything is built."""
    layers = sum(layer.repeat for name in config.stacks for layer in getattr(config, name, ()))
    most = max(MAX_LAYERS, len(stored))
    if layers > most:
        raise UserError(f"{stored.path}: {len(stored):,} tensors, but the config has {layers:,} layers")
    parameters, size = config.cost(1).parameters, stored.path.stat().st_size
    if parameters > 8 * size:  # a parameter takes at least a bit
        raise UserError(f"{stored.path}: {size:,} bytes, but the config has {parameters:,} parameters")


def read_about(path: Path) -> dict[str, Any]:
    """config.json of a model folder. Errors say what is wrong with the folder, or which plugin it needs."""
    if not path.exists():
        raise UserError(f"{path}: no such model folder")
    if not has_file(path, "config.json") and (path / "model" / "config.json").is_file():
        raise UserError(f"{path}: is a run folder; its model is {path / 'model'}")
    if not has_file(path, "config.json"):
        raise UserError(f"{path}: not a model folder (it has no config.json)")
    if (size := file_in(path, "config.json").stat().st_size) > MAX_JSON_BYTES:
        raise UserError(f"{path / 'config.json'}: {size:,} bytes, too large for a config")
    text = read_text(path, "config.json")
    try:
        about = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path / 'config.json'}: cannot read: {error}") from None
    needed = {"format", "model", "sha256", "tokenizer_hash", "task", "decoding", "max_tokens", "directions"}
    if not isinstance(about, dict) or not needed <= set(about):
        raise UserError(
            f"{path / 'config.json'}: neither a config of allyouneed (which has {sorted(needed)}) nor of "
            f"Hugging Face transformers (which has 'model_type')"
        )
    if about["format"] != FORMAT:
        raise UserError(
            f"{path}: folder format {about['format']} is not {FORMAT}; use a matching version of allyouneed"
        )
    parse(FolderConfig, about, str(path / "config.json"))
    plugins.check_required(about.get("plugins", []), str(path))
    return about


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; a tied matrix appears once."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named_tensors(model).items()}


def read_weights(model: nn.Module, file: Path) -> None:
    """Load a safetensors file into the model; missing, unexpected and misshapen weights are reported all at once."""
    stored = MappedFile(file)
    wanted = named_tensors(model)
    check_fit(file, stored, wanted, left_over=sorted(set(stored) - set(wanted)))
    _copy(stored, wanted)


def read_body(
    model: nn.Module, stored: Mapping[str, Tensor], where: Path, same_head: bool = True, head: str = "head."
) -> list[str]:
    """Load all but the head, and the head too if `same_head` and its weights fit; the names of weights that stay
    freshly initialized."""
    wanted = named_tensors(model)
    body = {name: tensor for name, tensor in wanted.items() if not name.startswith(head)}
    unexpected = [name for name in sorted(set(stored) - set(wanted)) if not name.startswith(head)]
    check_fit(where, stored, body, left_over=unexpected)
    same = same_head and set(wanted) == set(stored) and not _misshapen(stored, wanted)
    _copy(stored, wanted if same else body)
    return [] if same else sorted(set(wanted) - set(body))


def check_fit(
    where: Path, stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], left_over: Sequence[str] = ()
) -> None:
    """Report every missing, unexpected or misshapen weight in one error."""
    problems = [f"{name}: missing" for name in sorted(set(wanted) - set(stored))]
    problems += [f"{name}: unexpected" for name in left_over]
    problems += _misshapen(stored, wanted)
    if problems:
        raise UserError(f"{where}: the weights do not fit the config\n  " + "\n  ".join(problems))


def _misshapen(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    problems = []
    for name in sorted(set(stored) & set(wanted)):
        shape = stored.shape(name) if isinstance(stored, MappedFile) else tuple(stored[name].shape)
        if shape != (expected := tuple(wanted[name].shape)):
            problems.append(f"{name}: {shape} in the file, {expected} in the model")
        dtype = stored.dtype(name) if isinstance(stored, MappedFile) else stored[name].dtype
        if problem := dtype_problem(dtype, wanted[name].dtype):
            problems.append(f"{name}: {problem}")
    return problems


def _copy(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored[name])
