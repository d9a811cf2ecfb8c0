"""Other people's weights in our names, for the parity tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import parse
from allyouneed.nn.encoder_decoder import EncoderDecoder


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
    config = marian.config
    block = {
        "wiring": "post-norm",
        "mixer": {"kind": "attention", "heads": config.encoder_attention_heads},
        "channel": {"kind": "ffn", "hidden": config.encoder_ffn_dim, "activation": config.activation_function},
    }
    heads = {"kind": "attention", "heads": config.decoder_attention_heads}
    ours = parse(
        EncoderDecoder,
        {
            "vocab": config.vocab_size,
            "width": config.d_model,
            "embed": {
                "positions": {"kind": "sinusoidal", "order": "halves"},
                "scale": "sqrt-width" if config.scale_embedding else "none",
                "tied": True,
            },
            "encoder": [block | {"repeat": config.encoder_layers}],
            "decoder": [
                block | {"repeat": config.decoder_layers, "mixer": heads | {"pattern": "causal"}, "cross": heads}
            ],
        },
    ).build()
    ours.load_state_dict(_marian_weights(marian.state_dict(), config))
    return ours.eval()


def _marian_weights(theirs: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    assert not theirs["final_logits_bias"].any(), "a bias on the logits has no place in our head"
    ours = {"embed.tokens.weight": theirs["model.shared.weight"], "head.weight": theirs["model.shared.weight"]}
    stacks = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    for stack, layers in stacks.items():
        for number in range(layers):
            there, here = f"model.{stack}.layers.{number}", f"{stack}.blocks.{number}"
            moves = {
                "sublayers.mixer.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                "sublayers.mixer.out": ["self_attn.out_proj"],
                "sublayers.channel.up": ["fc1"],
                "sublayers.channel.down": ["fc2"],
                "wiring.norms.0": ["self_attn_layer_norm"],
                "wiring.norms.1": ["final_layer_norm"],
            }
            if stack == "decoder":
                moves |= {
                    "sublayers.cross.q": ["encoder_attn.q_proj"],
                    "sublayers.cross.kv": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
                    "sublayers.cross.out": ["encoder_attn.out_proj"],
                    "wiring.norms.1": ["encoder_attn_layer_norm"],
                    "wiring.norms.2": ["final_layer_norm"],
                }
            for name, parts in moves.items():
                for kind in ("weight", "bias"):
                    ours[f"{here}.{name}.{kind}"] = torch.cat([theirs[f"{there}.{part}.{kind}"] for part in parts])
    return ours
