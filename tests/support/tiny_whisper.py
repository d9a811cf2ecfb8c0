"""A very small Whisper of Hugging Face's with random weights, a vocabulary of bytes and windows of one second; and the
same as a folder of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

import allyouneed as ayn
import parity
from allyouneed.infer.predictors.transcriber import Transcriber

PLACES, MELS, LONGEST = 50, 8, 48
LANGUAGES = ("en", "de", "zh")
SPECIALS = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
SPECIALS += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
SPECIALS += [f"<|{n * 0.02:.2f}|>" for n in range(PLACES + 1)]


def vocabulary() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made


def theirs(seed: int = 0, multilingual: bool = True, likely: float = 0.0) -> Any:
    """`likely`: how much likelier time tokens and the end are made than chance has them."""
    ids = {text: 256 + n for n, text in enumerate(SPECIALS)}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = WhisperConfig(
        d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=40, decoder_ffn_dim=40, vocab_size=256 + len(SPECIALS), max_source_positions=PLACES,
        max_target_positions=LONGEST, num_mel_bins=MELS, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=start, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    parity.randomise(model, seed)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[ids["<|0.00|>"] :] *= 1 + likely
        model.model.decoder.embed_tokens.weight[end] *= 1 + likely
        model.model.decoder.embed_positions.weight *= 4
        model.model.decoder.layers[-1].encoder_attn.out_proj.weight *= 4
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    unprinted = [n for n, letter in enumerate(letters) if not letter.isascii() or not letter.isalnum()]
    said = dict(
        is_multilingual=multilingual,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        begin_suppress_tokens=[32, end],
        suppress_tokens=[*unprinted, start, ids["<|translate|>"], ids["<|transcribe|>"], ids["<|nospeech|>"]],
        max_initial_timestamp_index=20,
        pad_token_id=end, eos_token_id=end, bos_token_id=end, decoder_start_token_id=start,
        max_length=LONGEST,
    )  # fmt: skip
    if multilingual:
        said["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        said["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")}
    for key, value in said.items():
        setattr(model.generation_config, key, value)
    return model


def ours(model: Any, path: Path) -> Transcriber:
    """Saved as they save it, and read."""
    model.save_pretrained(path)
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=vocabulary(), eos_token=end, pad_token=end).save_pretrained(path)
    found: Transcriber = ayn.load(path)
    return found


def sound(seconds: float, seed: int = 0) -> torch.Tensor:
    """Tones that come and go, so that each moment is another one."""
    time = torch.arange(int(seconds * 16_000)) / 16_000
    dice = torch.Generator().manual_seed(seed)
    pitch = 300 + 2000 * torch.rand(64, generator=dice).repeat_interleave(3_000)[: len(time)]
    loud = torch.rand(64, generator=dice).repeat_interleave(2_500)[: len(time)]
    return 0.5 * loud * torch.sin(2 * torch.pi * pitch * time)
