"""The same inputs through a model of ours and through the original: what differs, and by how much.

Both compute in float32, whatever their weights are stored in, one after the other, so that memory holds one of them.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.folder import Folder, as_dtype
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.forward import Called, takes
from allyouneed.interop.load import load

TOLERANCE = 1e-4  # of the largest number, or of 1: sums are made in another order
LENGTHS = (7, 3, 11, 1, 5)
STEPS = 12  # tokens that both go on by
TEXTS = ["Hello, world!", "Machine learning is fun.", "机器学习很有趣。", "naïve café — 3.14"]
WRITES = ("causal-lm", "translation", "seq2seq")
SCORES = ("logits", "prediction_logits", "logits_per_image")  # what they call them


@dataclass
class Check:
    """`lines` say what was compared; it is `agreed` when nothing differs by more than it may."""

    agreed: bool = True
    lines: list[str] = field(default_factory=list)

    def add(self, line: str, good: bool) -> None:
        self.lines.append(line if good else f"{line}: THEY DISAGREE")
        self.agreed = self.agreed and good


@dataclass
class Probe:
    """The same questions in both languages: `ours` and `theirs` by the names of inputs, `prompts` to go on from."""

    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Tensor] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    reads: bool = False  # they are sources, and what is written is a text of its own
    alone: bool = False  # each text by itself
    steps: int = STEPS
    start: int = 0
    end: int = 0
    pad: int = 0

    def texts(self, rows: list[list[int]], name: str, tokens: str, mask: str) -> None:
        longest = max(map(len, rows))
        self.ours[name] = rows
        self.theirs[tokens] = torch.tensor([[*row, *[self.pad] * (longest - len(row))] for row in rows])
        self.theirs[mask] = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def there() -> bool:
    return importlib.util.find_spec("transformers") is not None


@torch.no_grad()
def against_transformers(ours: Path, theirs: Path, rounded: str | None = None) -> Check:
    """A folder of ours and one of theirs that ought to hold the same model; `rounded`: the precision that ours was
    stored in because somebody asked for it; the original's weights are rounded to it as well."""
    check = Check()
    size = 4 * sum(parameter.numel() for parameter in load(ours).model.parameters())
    if size > (room := _memory()):
        check.lines.append(f"not compared: that takes {size / 1e9:.1f} GB of memory, and {room / 1e9:.1f} are free")
        return check
    folder = load(ours, dtype="float32")
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    try:
        asked = questions(folder, _filled_in(theirs))
        found, written = _answers(folder, asked)
        words = _tokenized(folder, theirs)
        del folder
        original = _original(theirs, config, as_dtype(rounded))
    except ImportError as error:
        check.lines.append(f"not compared with the original: {error}")
        return check
    except Exception as error:  # whatever they raise is about this folder
        check.add(f"transformers cannot load {theirs} ({type(error).__name__}: {error})", False)
        return check
    apart = difference(found, _result(original, asked), asked)
    check.add(f"largest difference of outputs {apart:.1e} (allowed {TOLERANCE:.0e})", apart <= TOLERANCE)
    if written:
        pairs = zip(asked.prompts, written, strict=True)
        same = sum(_goes_on(original, asked, row) == one for row, one in pairs)
        check.add(f"generated text the same {same} of {len(written)} times", same == len(written))
    if words is not None:
        check.add(f"tokens of texts the same {words[0]} of {words[1]} times", words[0] == words[1])
    return check


def _memory() -> float:
    """Bytes that are free, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), float("inf"))


# --- questions --------------------------------------------------------------------------------------------------------


def questions(folder: Folder, theirs: Any) -> Probe:
    """Random texts of unequal lengths, images and sounds, whatever the model takes. `theirs`: their config object."""
    config: Any = folder.model.config
    text = getattr(theirs, "text_config", theirs)
    able, dice = takes(config), torch.Generator().manual_seed(0)
    asked = Probe(pad=_number(text, "pad"), end=_number(text, "eos"), start=_number(text, "decoder_start"))
    asked.alone = folder.task["kind"] == "classification"
    if "tokens" in able:
        rows = _sentences(folder, asked, dice)
        asked.texts(rows, "tokens", "input_ids", "attention_mask")
    if "targets" in able and config.kind == "encoder-decoder":
        rows = _sentences(folder, asked, dice)
        asked.texts(rows, "targets", "decoder_input_ids", "decoder_attention_mask")
    if "pixels" in able:
        patches: Any = (config.image if config.kind == "two-towers" else config).embed
        sides = [patches.image] * 2 if isinstance(patches.image, int) else list(patches.image)
        images = torch.randn(len(LENGTHS), patches.channels, *sides, generator=dice)
        asked.ours["pixels"] = asked.theirs["pixel_values"] = images
    if "features" in able:
        sounds = torch.randn(len(LENGTHS), theirs.num_mel_bins, 2 * theirs.max_source_positions, generator=dice)
        asked.ours["features"] = asked.theirs["input_features"] = sounds
    if folder.task["kind"] in WRITES:
        asked.prompts, asked.reads = _sentences(folder, asked, dice, share=2), config.kind == "encoder-decoder"
        asked.steps = min(STEPS, max(1, (config.limit or 2 * STEPS) // 2 - 1))
        if asked.start == asked.pad:  # some of theirs do not count what looks like padding
            asked.start = asked.prompts[0][0]
    return asked


def _sentences(folder: Folder, asked: Probe, dice: torch.Generator, share: int = 1) -> list[list[int]]:
    """Without special tokens. `share`: only that part of the places there are is used."""
    config: Any = getattr(folder.model.config, "text", folder.model.config)
    special = {asked.pad} | (set() if folder.vocabularies is None else set(folder.vocabularies.source.specials))
    last = []
    if folder.task["kind"] == "image-text":  # a text's vector is read where its end mark stands
        last = [config.vocab - 1 if asked.end == 2 else asked.end]  # 2: they take the largest number for it
    words = [n for n in range(config.vocabs.source) if n not in special and n not in last]
    words = words or list(range(config.vocabs.source))
    most = max(1, min(config.limit or max(LENGTHS), max(LENGTHS)) // share - len(last))
    picks = [torch.randint(len(words), (min(length, most),), generator=dice).tolist() for length in LENGTHS]
    return [[words[pick] for pick in row] + last for row in picks]


def _number(config: Any, name: str) -> int:
    found = getattr(config, f"{name}_token_id", None)
    found = found[0] if isinstance(found, list) else found
    return 0 if found is None else int(found)


# --- answers ----------------------------------------------------------------------------------------------------------


def _answers(folder: Folder, asked: Probe) -> tuple[Tensor, list[list[int]]]:
    """Ours: scores (or vectors, of a model without a head), and how each prompt goes on, likeliest token by token."""
    config: Any = folder.model.config
    called = Called(folder.model, asked.pad)
    bare = getattr(getattr(config, "head", None), "kind", "") in ("none", "pooled")
    found: Tensor = called.hidden(asked.ours) if bare else called.logits(asked.ours)
    if not asked.prompts:
        return found, []
    engine = Engine(folder.model, bos=asked.start, eos=asked.end, pad=asked.pad)
    decoding = Decoding(method="greedy", max_length=asked.steps, extra=asked.steps, loops=None)
    answers = engine.generate(asked.prompts, decoding) if asked.reads else engine.complete(asked.prompts, decoding)
    return found, [list(answer[0].tokens) for answer in answers]


def _result(original: Any, asked: Probe) -> Any:
    """Theirs. Classes of texts are asked for one by one: some of their classes read them where the padding stands."""
    if not asked.alone:
        return original(**asked.theirs)
    rows = [torch.tensor([row]) for row in asked.ours["tokens"]]
    return {"logits": torch.cat([original(input_ids=row).logits for row in rows])}


def _goes_on(original: Any, asked: Probe, row: list[int]) -> list[int]:
    """Theirs, computed anew for each token, whatever their generation config would add."""
    said: list[int] = []
    while len(said) < asked.steps:
        given = {"input_ids": row} if asked.reads else {"input_ids": row + said}
        given |= {"decoder_input_ids": [asked.start, *said]} if asked.reads else {}
        logits = original(**{name: torch.tensor([ids]) for name, ids in given.items()}).logits
        if (token := int(logits[0, -1].argmax())) == asked.end:
            break
        said.append(token)
    return said


def difference(found: Tensor, result: Any, asked: Probe) -> float:
    """Largest difference, relative to the largest number where that is above one; padding is not looked at."""
    scores = [result[name] for name in SCORES if name in result]
    expected: Tensor = scores[0] if scores else result.last_hidden_state
    rows = asked.ours.get("targets", asked.ours.get("tokens"))
    if found.dim() == 3 and rows is not None:
        real = torch.arange(found.shape[1])[None] < torch.tensor([len(row) for row in rows])[:, None]
        found, expected = found[real], expected[:, : real.shape[1]][real]
    if found.dim() == expected.dim() + 1:
        found = found.squeeze(-1)  # one score a token
    if not found.isfinite().all() or found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _tokenized(folder: Folder, path: Path) -> tuple[int, int] | None:
    """How many texts both cut into the same tokens; None where there is nothing to compare."""
    if folder.vocabularies is None:
        return None
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # a library of theirs that is not installed here
        return None
    ours = folder.vocabularies.source
    pairs = [(ours.encode(text), theirs(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    if ours.foreign:
        pairs += [(ours.frame(ours.encode(text))[0], theirs(text)["input_ids"]) for text in TEXTS]
    return sum(list(one) == list(other) for one, other in pairs), len(pairs)


# --- the original -----------------------------------------------------------------------------------------------------


def _filled_in(path: Path) -> Any:
    """Their config with their defaults."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True)


def _original(path: Path, config: dict[str, Any], rounded: torch.dtype | None) -> Any:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        names = config.get("architectures") or ["AutoModelForCausalLM"]
        made = getattr(transformers, names[0], transformers.AutoModel)
        model = made.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    finally:
        transformers.logging.set_verbosity(level)
    for tensor in model.state_dict().values() if rounded is not None else ():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(rounded))
    return model
