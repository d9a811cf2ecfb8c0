"""Reference weights under our names, for the parity tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allyouneed.interop.families import FAMILIES


def random_marian(
    seed: int, vocab: int = 61, width: int = 32, layers: int = 2, heads: int = 4, ends: float = 4.0
) -> Any:
    """A MarianMTModel with random weights, made decisive; id 0 ends a sentence, the last id pads and begins it.

    A tied random model says the token it has just read for ever: mixing the signs of the last norm breaks the loop, and
    `ends` adds so much to the logit of the end mark, so that sentences of many lengths come out.
    """
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(seed)
    config = MarianConfig(
        vocab_size=vocab,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_position_embeddings=256,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        eos_token_id=0,
        forced_eos_token_id=None,
        pad_token_id=vocab - 1,
        decoder_start_token_id=vocab - 1,
    )
    model = MarianMTModel(config).eval()
    model.generation_config.bad_words_ids = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name:
                continue
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "layer_norm" not in name:
                parameter.normal_(std=0.1)
        shared, norm = model.model.shared.weight, model.model.decoder.layers[-1].final_layer_norm
        shared.mul_(2)
        norm.weight.normal_()
        norm.bias.copy_(ends * shared[0] / shared[0].square().sum())
    return model


def from_marian(marian: Any) -> nn.Module:
    """The same model built of our parts."""
    return FAMILIES["marian"].convert(marian.config.to_dict(), marian.state_dict())
