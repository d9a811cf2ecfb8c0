"""Whisper as its authors give it away: one `.pt` file of sizes and weights, and a file of ranks for the vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allyouneed.data.media.sound import HOP, RATE, WINDOW
from allyouneed.data.media.speech import LANGUAGES, TASKS, TICK
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.hf.whisper_tokens import MULTILINGUAL, rules
from allyouneed.interop.tokenizers.tiktoken import byte_pair_encoding, read_ranks

SIZES = {
    "n_mels": "num_mel_bins",
    "n_vocab": "vocab_size",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_text_ctx": "max_target_positions",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}
WIDER = 4  # the channel mixer, than the model
# Hugging Face's names for theirs, one after the other
NAMES = (
    (r"^", "model."),
    (r"\.blocks\.", ".layers."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.(query|key|value)\.", lambda found: f".{found[1][0]}_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\.ln(_post)?\.", ".layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)
TIMES = 1501  # from 0.00 to 30.00 seconds
MARKS = 8  # specials that are no language and no time
OLD_LANGUAGES = 99
MOST_LAYERS, LARGEST = 1_000, 1 << 20
FIRST_WITHIN = 1.0  # seconds (4.5)


def is_one(content: Any) -> bool:
    return isinstance(content, Mapping) and {"dims", "model_state_dict"} <= set(content)


def read(content: Mapping[str, Any], path: Path, tokenizer: Path | None = None) -> Folder:
    dims = _checked(content, path)
    vocabulary = _vocabulary(path, dims["n_vocab"], tokenizer)
    config: dict[str, Any] = {ours: dims[theirs] for theirs, ours in SIZES.items()}
    config |= {f"{side}_ffn_dim": WIDER * config["d_model"] for side in ("encoder", "decoder")}
    ids = {"eos_token_id": vocabulary.eos, "bos_token_id": vocabulary.eos, "pad_token_id": vocabulary.eos}
    config |= ids | {"decoder_start_token_id": vocabulary.special("<|startoftranscript|>")}
    config |= {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
    }
    weights = {_renamed(name): tensor.float() for name, tensor in content["model_state_dict"].items()}
    model = FAMILIES["whisper"].convert(config, weights)
    generation = _generation(vocabulary, config)
    task = {"kind": "transcription", **rules(config, generation, vocabulary)}
    made = Folder(model, Vocabularies(vocabulary, vocabulary), task, max_tokens=config["max_target_positions"])
    made.path, made.origin = path, {"family": "whisper", "config": config, "generation": generation}
    files = {"generation_config.json": generation, "preprocessor_config.json": _hearing(config)}
    made.originals = {name: json.dumps(tree, indent=2).encode() for name, tree in files.items()}
    return made


def _checked(content: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The sizes, if they can be those of a model."""
    dims, weights = content["dims"], content["model_state_dict"]
    if not isinstance(dims, Mapping) or not isinstance(weights, Mapping):
        raise UserError(f"{path}: no Whisper model: it holds no sizes and weights by name")
    strange = sorted(set(dims) ^ {*SIZES, "n_text_state"})
    if strange or dims["n_text_state"] != dims["n_audio_state"]:
        raise UserError(f"{path}: sizes of another kind of Whisper: {', '.join(map(str, strange)) or 'two widths'}")
    wrong = [f"{name}: {size!r}" for name, size in dims.items() if not _sane(name, size)]
    wrong += [f"{name}: no tensor" for name, tensor in weights.items() if not isinstance(tensor, Tensor)]
    if wrong:
        raise UserError(f"{path}: what no Whisper has\n  " + "\n  ".join(wrong))
    return dict(dims)


def _sane(name: str, size: Any) -> bool:
    return isinstance(size, int) and 0 < size <= (MOST_LAYERS if name.endswith("_layer") else LARGEST)


def _renamed(name: str) -> str:
    for pattern, new in NAMES:
        name = re.sub(pattern, new, name)
    return name


def _vocabulary(path: Path, size: int, tokenizer: Path | None) -> Tokenizer:
    """The file of ranks that was named, or the one that lies beside the model."""
    name = "multilingual.tiktoken" if size >= MULTILINGUAL else "gpt2.tiktoken"
    file = tokenizer or path.with_name(name)
    if file.is_dir():
        file = file / name
    if not file.is_file():
        raise UserError(
            f"{path}: it comes without its vocabulary; put {name} beside it, or name that file as tokenizer"
        )
    ranks = read_ranks(file)
    languages = size - len(ranks) - MARKS - TIMES
    if languages not in (OLD_LANGUAGES, len(LANGUAGES)):
        raise UserError(f"{path}: {size} tokens, which {file} with {len(ranks)} pieces does not fit; {name} does")
    specials = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES[:languages])]
    specials += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    specials += ["<|notimestamps|>", *(f"<|{n * 0.02:.2f}|>" for n in range(TIMES))]
    inner = byte_pair_encoding(ranks, specials)
    end, start = (inner.token_to_id(text) for text in ("<|endoftext|>", "<|startoftranscript|>"))
    return Tokenizer(inner, pad=end, bos=start, eos=end, template=Template(after=(end,), opening=(start,)))


def _generation(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Hugging Face writes into a generation config, of what the authors' code takes for granted."""
    marks = [f"<|{name}|>" for name in ("startoftranscript", *TASKS, "startoflm", "startofprev", "nospeech")]
    several = config["vocab_size"] >= MULTILINGUAL
    found = {key: value for key, value in config.items() if key.endswith("_token_id")} | {
        "suppress_tokens": sorted({*no_speech(tokenizer), *map(tokenizer.special, marks)}),
        "begin_suppress_tokens": [*tokenizer.encode(" "), tokenizer.eos],
        "is_multilingual": several,
        "no_timestamps_token_id": tokenizer.special("<|notimestamps|>"),
        "prev_sot_token_id": tokenizer.special("<|startofprev|>"),
        "max_initial_timestamp_index": round(FIRST_WITHIN / TICK),
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
    }
    if several:
        last = tokenizer.special("<|translate|>") - tokenizer.special("<|startoftranscript|>") - 1
        found["lang_to_id"] = {f"<|{code}|>": tokenizer.special(f"<|{code}|>") for code in LANGUAGES[:last]}
        found["task_to_id"] = {name: tokenizer.special(f"<|{name}|>") for name in TASKS}
    return found


def _hearing(config: Mapping[str, Any]) -> dict[str, Any]:
    """And what it writes of how sound is heard."""
    seconds = round(config["max_source_positions"] * TICK)
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": RATE,
        "hop_length": HOP,
        "n_fft": WINDOW,
        "chunk_length": seconds,
        "n_samples": seconds * RATE,
        "nb_max_frames": seconds * RATE // HOP,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": False,
        "dither": 0.0,
    }


# what subtitles write that nobody says
PAIRS = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *PAIRS.split(),
]
MUSIC = "♩♪♫♬♭♮♯"  # several tokens each; the first is enough


def no_speech(tokenizer: Tokenizer) -> set[int]:
    """Tokens of symbols and of notes of music. A hyphen or an apostrophe may stand inside a word, but begins none."""
    found = {tokenizer.encode(text)[0] for text in (" -", " '")}
    for symbol in [*SYMBOLS, *MUSIC]:
        for ids in (tokenizer.encode(symbol), tokenizer.encode(f" {symbol}")):
            if len(ids) == 1 or symbol in MUSIC:
                found.add(ids[0])
    return found
