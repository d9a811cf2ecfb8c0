"""OpenAI's Whisper files: one `.pt` with sizes and weights, and a tiktoken file with the vocabulary."""

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
from allyouneed.data.tokenizers.bounds import check_tokenizer
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.files.reading import has_file, named_file
from allyouneed.folder import Folder
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.hf.checkpoint import plain_tensors
from allyouneed.interop.hf.whisper_tokens import MULTILINGUAL, speech_options
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
FFN_FACTOR = 4
# substitutions from OpenAI's names to Hugging Face's, applied in order
RENAMES = (
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
TIMESTAMPS = 1501  # from 0.00 to 30.00 seconds
CONTROL_TOKENS = 8  # special tokens besides languages and timestamps
OLD_LANGUAGES = 99
MAX_LAYERS, MAX_SIZE = 1_000, 1 << 20
MAX_FIRST_TIMESTAMP = 1.0  # seconds (Radford et al. 2022, section 4.5)


def is_whisper(content: Any) -> bool:
    return isinstance(content, Mapping) and {"dims", "model_state_dict"} <= set(content)


def read(content: Mapping[str, Any], path: Path, tokenizer: Path | None = None) -> Folder:
    dims = _check_sizes(content, path)
    vocabulary = _vocabulary(path, dims["n_vocab"], tokenizer)
    config: dict[str, Any] = {ours: dims[theirs] for theirs, ours in SIZES.items()}
    config |= {f"{side}_ffn_dim": FFN_FACTOR * config["d_model"] for side in ("encoder", "decoder")}
    ids = {"eos_token_id": vocabulary.eos, "bos_token_id": vocabulary.eos, "pad_token_id": vocabulary.eos}
    config |= ids | {"decoder_start_token_id": vocabulary.special("<|startoftranscript|>")}
    config |= {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
    }
    stored = plain_tensors(content["model_state_dict"], path)
    weights = {_rename(name): tensor.float() for name, tensor in stored.items()}
    model = FAMILIES["whisper"].convert(config, weights)
    generation = _generation(vocabulary, config)
    task = {"kind": "transcription", **speech_options(config, generation, vocabulary)}
    made = Folder(model, Vocabularies(vocabulary, vocabulary), task, max_tokens=config["max_target_positions"])
    made.path, made.origin = path, {"family": "whisper", "config": config, "generation": generation}
    files = {"generation_config.json": generation, "preprocessor_config.json": _preprocessor(config)}
    made.originals = {name: json.dumps(tree, indent=2).encode() for name, tree in files.items()}
    return made


def _check_sizes(content: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The model sizes, if they are possible."""
    dims, weights = content["dims"], content["model_state_dict"]
    if not isinstance(dims, Mapping) or not isinstance(weights, Mapping):
        raise UserError(f"{path}: not a Whisper model: no sizes and weights by name")
    unexpected = sorted(set(dims) ^ {*SIZES, "n_text_state"})
    if unexpected or dims["n_text_state"] != dims["n_audio_state"]:
        what = ", ".join(map(str, unexpected)) or "encoder and decoder widths differ"
        raise UserError(f"{path}: unsupported Whisper sizes: {what}")
    wrong = [f"{name}: {size!r}" for name, size in dims.items() if not _is_possible(name, size)]
    wrong += [f"{name}: not a tensor" for name, tensor in weights.items() if not isinstance(tensor, Tensor)]
    if wrong:
        raise UserError(f"{path}: impossible sizes or weights\n  " + "\n  ".join(wrong))
    return dict(dims)


def _is_possible(name: str, size: Any) -> bool:
    return isinstance(size, int) and 0 < size <= (MAX_LAYERS if name.endswith("_layer") else MAX_SIZE)


def _rename(name: str) -> str:
    for pattern, new in RENAMES:
        name = re.sub(pattern, new, name)
    return name


def _vocabulary(path: Path, size: int, tokenizer: Path | None) -> Tokenizer:
    """The tokenizer from the given tiktoken file, by default the one beside the model."""
    name = "multilingual.tiktoken" if size >= MULTILINGUAL else "gpt2.tiktoken"
    file = tokenizer or path.with_name(name)
    if file.is_dir():
        file = file / name
    if not has_file(file.parent, file.name):
        raise UserError(f"{path}: no vocabulary; put {name} beside it, or pass that file as tokenizer")
    ranks = read_ranks(file if tokenizer is None else Path(*named_file(file)))
    languages = size - len(ranks) - CONTROL_TOKENS - TIMESTAMPS
    if languages not in (OLD_LANGUAGES, len(LANGUAGES)):
        raise UserError(
            f"{path}: a vocabulary of {size} tokens does not match {file} with {len(ranks)} pieces; use {name}"
        )
    specials = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES[:languages])]
    specials += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    specials += ["<|notimestamps|>", *(f"<|{n * 0.02:.2f}|>" for n in range(TIMESTAMPS))]
    inner = byte_pair_encoding(ranks, specials)
    check_tokenizer(inner, str(file))
    end, start = (inner.token_to_id(text) for text in ("<|endoftext|>", "<|startoftranscript|>"))
    return Tokenizer(inner, pad=end, bos=start, eos=end, template=Template(after=(end,), opening=(start,)))


def _generation(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    """The generation config that Hugging Face writes, from what OpenAI's code hard-codes."""
    control = [f"<|{name}|>" for name in ("startoftranscript", *TASKS, "startoflm", "startofprev", "nospeech")]
    multilingual = config["vocab_size"] >= MULTILINGUAL
    found = {key: value for key, value in config.items() if key.endswith("_token_id")} | {
        "suppress_tokens": sorted({*non_speech_tokens(tokenizer), *map(tokenizer.special, control)}),
        "begin_suppress_tokens": [*tokenizer.encode(" "), tokenizer.eos],
        "is_multilingual": multilingual,
        "no_timestamps_token_id": tokenizer.special("<|notimestamps|>"),
        "prev_sot_token_id": tokenizer.special("<|startofprev|>"),
        "max_initial_timestamp_index": round(MAX_FIRST_TIMESTAMP / TICK),
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
    }
    if multilingual:
        last = tokenizer.special("<|translate|>") - tokenizer.special("<|startoftranscript|>") - 1
        found["lang_to_id"] = {f"<|{code}|>": tokenizer.special(f"<|{code}|>") for code in LANGUAGES[:last]}
        found["task_to_id"] = {name: tokenizer.special(f"<|{name}|>") for name in TASKS}
    return found


def _preprocessor(config: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessor config that Hugging Face writes."""
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


# symbols of subtitles that are not speech
PAIRS = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
SYMBOLS = [*'"#()*+/:;<=>@[\\]^_`{|}~「」『』', *PAIRS.split()]
MUSIC = "♩♪♫♬♭♮♯"  # several tokens each; banning the first suffices


def non_speech_tokens(tokenizer: Tokenizer) -> set[int]:
    """Tokens of symbols and musical notes. Hyphens and apostrophes are only banned at the start of a word."""
    found = {tokenizer.encode(text)[0] for text in (" -", " '")}
    for symbol in [*SYMBOLS, *MUSIC]:
        for ids in (tokenizer.encode(symbol), tokenizer.encode(f" {symbol}")):
            if len(ids) == 1 or symbol in MUSIC:
                found.add(ids[0])
    return found
