"""The same weights in Hugging Face's MarianMTModel and in ours: the same logits and the same gradients."""

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from allyouneed.config import parse
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model
from parity import difference

PAD, VOCAB = 0, 19
CASES = [
    # width, heads of encoder and decoder, hidden of both, layers of both, activation, embeddings scaled
    (12, (3, 2), (20, 7), (1, 1), "relu", True),
    (16, (4, 4), (33, 33), (2, 3), "gelu", True),
    (30, (5, 6), (9, 64), (3, 1), "swish", False),
]
SOURCES = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 2], [12], [13, 14, 15, 16, 2]]
TARGETS = [[1, 3, 5], [1, 4, 6, 8, 10, 12, 14, 18], [1, 7, 9, 11], [1]]


def both(width, heads, hidden, layers, activation, scaled):
    theirs = MarianMTModel(
        MarianConfig(
            vocab_size=VOCAB,
            decoder_vocab_size=VOCAB,
            d_model=width,
            encoder_attention_heads=heads[0],
            decoder_attention_heads=heads[1],
            encoder_ffn_dim=hidden[0],
            decoder_ffn_dim=hidden[1],
            encoder_layers=layers[0],
            decoder_layers=layers[1],
            activation_function=activation,
            scale_embedding=scaled,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            pad_token_id=PAD,
            eos_token_id=2,
            decoder_start_token_id=1,
            share_encoder_decoder_embeddings=True,
            tie_word_embeddings=True,
        )
    ).eval()
    own = {"swish": "silu"}.get(activation, activation)
    attention = [{"kind": "attention", "heads": count} for count in heads]
    channel = [{"kind": "ffn", "hidden": size, "activation": own} for size in hidden]
    tree = {
        "kind": "encoder-decoder",
        "vocab": VOCAB,
        "width": width,
        "embed": {
            "positions": {"kind": "sinusoidal", "order": "halves"},
            "scale": "sqrt-width" if scaled else "none",
        },
        "encoder": [{"repeat": layers[0], "mixer": attention[0], "channel": channel[0]}],
        "decoder": [
            {
                "repeat": layers[1],
                "mixer": attention[1] | {"pattern": "causal"},
                "cross": attention[1],
                "channel": channel[1],
            }
        ],
    }
    return parse(Model, tree).build(), theirs


def pairs_of_weights(model, theirs):
    """(one of ours, those of theirs that it is made of, one below the other)"""

    def linear(part, *others):
        yield part.weight, [other.weight for other in others]
        yield part.bias, [other.bias for other in others]

    yield model.embed.tokens.weight, [theirs.model.shared.weight]
    for stack, other_stack in ((model.encoder, theirs.model.encoder), (model.decoder, theirs.model.decoder)):
        for block, other in zip(stack.blocks, other_stack.layers, strict=True):
            mixer, attention = block.sublayers["mixer"], other.self_attn
            yield from linear(mixer.qkv, attention.q_proj, attention.k_proj, attention.v_proj)
            yield from linear(mixer.out, attention.out_proj)
            norms = [other.self_attn_layer_norm, other.final_layer_norm]
            if "cross" in block.sublayers:
                cross, attention = block.sublayers["cross"], other.encoder_attn
                yield from linear(cross.q, attention.q_proj)
                yield from linear(cross.kv, attention.k_proj, attention.v_proj)
                yield from linear(cross.out, attention.out_proj)
                norms.insert(1, other.encoder_attn_layer_norm)
            yield from linear(block.sublayers["channel"].up, other.fc1)
            yield from linear(block.sublayers["channel"].down, other.fc2)
            for norm, other_norm in zip(block.wiring.norms, norms, strict=True):
                yield from linear(norm, other_norm)


def same_weights(model, theirs):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:  # their sinusoids are a parameter that does not learn
                noise = torch.randn(parameter.shape, generator=generator)
                matrix = parameter.dim() > 1
                parameter.copy_(noise * parameter.shape[1] ** -0.5 if matrix else noise * 0.1 + 1.0)
        found = list(pairs_of_weights(model, theirs))
        for own, others in found:
            own.copy_(torch.cat(others))
    assert {id(own) for own, _ in found} == {id(p) for p in model.parameters()}
    learning = {id(p) for p in theirs.parameters() if p.requires_grad}
    assert {id(other) for _, others in found for other in others} == learning
    return found


def near(found, expected):
    """1e-5 of the tensor's own scale: a gradient is a sum over all tokens, its small entries cancel."""
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, atol=1e-5 * scale, rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_gradients_are_those_of_marian(case, record_difference):
    model, theirs = both(*case)
    weights = same_weights(model, theirs)
    source, target = Rows.of(SOURCES, pad=PAD), Rows.of(TARGETS, pad=PAD)
    inside = torch.arange(target.tokens.shape[1])[None] < target.lengths[:, None]
    labels = torch.where(inside, target.tokens.roll(-1, 1), IGNORE)

    hidden = model(Batch(target, source))
    loss, _ = model.head.loss(hidden, labels, 0.0)
    result = theirs(
        input_ids=source.tokens,
        attention_mask=(torch.arange(source.tokens.shape[1])[None] < source.lengths[:, None]).long(),
        decoder_input_ids=target.tokens,
        decoder_attention_mask=inside.long(),
    )
    expected_loss = torch.nn.functional.cross_entropy(result.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    near(model.head(hidden)[inside], result.logits[inside])
    near(loss, expected_loss)

    loss.backward()
    expected_loss.backward()
    for own, others in weights:
        near(own.grad, torch.cat([other.grad for other in others]))
    gradients = max(difference(own.grad, torch.cat([other.grad for other in others])) for own, others in weights)
    outputs = difference(model.head(hidden)[inside], result.logits[inside])
    record_difference("Transformer", "transformers MarianMTModel", outputs, gradients)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_decoding_step_by_step_is_marians(case):
    """Unequal sources in one batch, a cache on either side."""
    model, theirs = both(*case)
    same_weights(model, theirs)
    model.eval()
    source = Rows.of(SOURCES, pad=PAD)
    mask = (torch.arange(source.tokens.shape[1])[None] < source.lengths[:, None]).long()
    tokens = torch.tensor([[1, 3, 5, 7], [1, 4, 6, 8], [1, 9, 9, 9], [1, 12, 2, 2]])
    with torch.no_grad():
        states, cache = model.start(source), None
        for step in range(tokens.shape[1]):
            new = tokens[:, step : step + 1]
            result = theirs(
                input_ids=source.tokens,
                attention_mask=mask,
                decoder_input_ids=new,
                past_key_values=cache,
                use_cache=True,
            )
            cache = result.past_key_values
            near(model.head(model.advance(Rows(new), states)), result.logits)
