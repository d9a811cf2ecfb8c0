"""A very small Whisper of Hugging Face's with random weights, a vocabulary of bytes and windows of one second; and the
same as a folder of ours."""

from __future__ import annotations

import base64
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


# --- OpenAI's files ---------------------------------------------------------------------------------------------------

PIECES = [bytes([n]) for n in range(256)]
MERGED = [
    b"th",
    b" t",
    b"he",
    b"the",
    b" the",
    b"in",
    b"ing",
    b"\xe2\x99",
    b"\xe2\x99\xaa",
    b"\xe4\xbd",
    b"\xe4\xbd\xa0",
]
MERGED += [b"ll", b"ell"]


def ranks_file(path, pieces):
    path.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % n for n, piece in enumerate(pieces)))
    return path


# their name of what Hugging Face calls the other
WITHIN = {
    "self_attn_layer_norm": "attn_ln", "encoder_attn_layer_norm": "cross_attn_ln", "final_layer_norm": "mlp_ln",
    "self_attn.q_proj": "attn.query", "self_attn.k_proj": "attn.key", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key", "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out", "fc1": "mlp.0", "fc2": "mlp.2",
}  # fmt: skip
OUTSIDE = {
    "model.encoder.embed_positions.weight": "encoder.positional_embedding",
    "model.decoder.embed_positions.weight": "decoder.positional_embedding",
    "model.decoder.embed_tokens.weight": "decoder.token_embedding.weight",
}


def their_name(name):
    if name in OUTSIDE:
        return OUTSIDE[name]
    *_, side = name.removeprefix("model.").split(".", 1)[0], name.split(".")[1]
    if ".layers." in name:
        number, rest = name.split(".layers.")[1].split(".", 1)
        inner, kind = rest.rsplit(".", 1)
        return f"{side}.blocks.{number}.{WITHIN[inner]}.{kind}"
    if ".layer_norm." in name:
        return f"{side}.{'ln_post' if side == 'encoder' else 'ln'}.{name.rsplit('.', 1)[1]}"
    return name.removeprefix("model.")


def write_openai(folder, pieces, languages=99):
    """A small model with random weights, saved as OpenAI does."""
    vocab = len(pieces) + 8 + languages + 1501
    config = WhisperConfig(
        vocab_size=vocab, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=50,
        max_target_positions=24, num_mel_bins=8, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    theirs = WhisperForConditionalGeneration(config).eval()
    dims = dict(n_mels=8, n_vocab=vocab, n_audio_ctx=50, n_audio_state=16, n_audio_head=2, n_audio_layer=2)
    dims |= dict(n_text_ctx=24, n_text_state=16, n_text_head=4, n_text_layer=1)
    weights = {their_name(name): w.half() for name, w in theirs.state_dict().items() if name != "proj_out.weight"}
    torch.save({"dims": dims, "model_state_dict": weights}, folder / "small.pt")
    return theirs.half().float(), folder / "small.pt"
