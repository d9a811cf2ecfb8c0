"""Training on CPU: real target tokens per second of ours, of torch.nn.Transformer and of Hugging Face Marian.

    python bench/train/cpu.py --pairs pairs.tsv
    python bench/train/cpu.py --family [mamba rwkv …] [--profile]      every mixer, or some (family_speed/train_cpu.py)

Same sizes (256 wide, 4 + 4 layers, 4 heads, 1024 hidden, vocabulary 8000, tied embeddings), same sentences, same
precision, same dropout (0.1 on sub-layer outputs and embeddings, none on attention weights: the paper's), same loss
(label smoothing 0.1), same optimiser (fused Adam, clipping). The peers get batches of similar length, padded, as
their users feed them; ours get packed rows. All three run in turns; a turn is one pass over the same sentences.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import override, parse, preset_tree
from allyouneed.data.batches.packing import PackedBatches, PaddedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Report
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.nn.batch import IGNORE, Batch
from allyouneed.nn.models.base import Model
from allyouneed.tasks.translation.translation import PairItems, Translation, pair_encoding
from bench.family_speed.train_cpu import family

WIDTH, HEADS, HIDDEN, LAYERS, VOCAB, DROPOUT, SMOOTHING = 256, 4, 1024, 4, 8000, 0.1, 0.1


class Ours(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        changes = [f"vocab={vocab}", f"dropout={DROPOUT}"]
        self.model = parse(Model, override(preset_tree("transformer-small"), changes)).build()  # type: ignore[type-abstract]
        self.task = Translation(smoothing=SMOOTHING)

    def forward(self, batch: Batch) -> Tensor:
        return self.task.loss(self.model, batch).total


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.flatten(0, 1).float()
    return cross_entropy(flat, labels.flatten(), ignore_index=IGNORE, label_smoothing=SMOOTHING, reduction="sum")


def padding(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and key-padding masks (True is padding) of both sides."""
    assert batch.source is not None
    masks = []
    for rows in (batch.source, batch.target):
        steps = torch.arange(rows.tokens.shape[1])[None]
        lengths = rows.lengths if rows.lengths is not None else torch.tensor([rows.tokens.shape[1]])
        masks.append((steps >= lengths[:, None]).expand(rows.tokens.shape))
    return batch.source.tokens, masks[0], batch.target.tokens, masks[1]


class TorchTransformer(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.core = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, DROPOUT, batch_first=True)
        for module in self.core.modules():  # the paper's dropout: neither on attention weights nor inside the FFN
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0
        self.dropout = nn.Dropout(DROPOUT)
        angles = torch.arange(1024)[:, None] * 10000 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], -1), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        source, source_pad, target, target_pad = padding(batch)
        time_target = target.shape[1]

        def embed(tokens: Tensor) -> Tensor:
            return self.dropout(self.embed(tokens) * math.sqrt(WIDTH) + self.table[: tokens.shape[1]])

        hidden = self.core(
            embed(source),
            embed(target),
            tgt_mask=torch.ones(time_target, time_target, dtype=torch.bool).triu(1),
            src_key_padding_mask=source_pad,
            tgt_key_padding_mask=target_pad,
            memory_key_padding_mask=source_pad,
            tgt_is_causal=True,
        )
        return plain_loss(hidden @ self.embed.weight.T.to(hidden.dtype), batch.labels)


class HuggingFaceMarian(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=vocab,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=HIDDEN,
            decoder_ffn_dim=HIDDEN,
            activation_function="relu",
            dropout=DROPOUT,
            attention_dropout=0.0,
            activation_dropout=0.0,
            scale_embedding=True,
            pad_token_id=0,
            decoder_start_token_id=1,
            eos_token_id=2,
            forced_eos_token_id=None,
            use_cache=False,
        )
        self.model = MarianMTModel(config)

    def forward(self, batch: Batch) -> Tensor:
        source, source_pad, target, target_pad = padding(batch)
        out = self.model(
            input_ids=source, attention_mask=(~source_pad).long(),
            decoder_input_ids=target, decoder_attention_mask=(~target_pad).long(), use_cache=False,
        )  # fmt: skip
        return plain_loss(out.logits, batch.labels)


def stepper(model: nn.Module, bf16: bool) -> Callable[[Batch], None]:
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def step(batch: Batch) -> None:
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = model(batch)
        (loss / batch.labels.ne(IGNORE).sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", metavar="MIXER", help="every mixer in one skeleton, or these")
    parser.add_argument("--profile", action="store_true", help="profile a step of the mixers named")
    parser.add_argument("--pairs", help="sentence pairs: a TSV file, .gz and .zst too")
    parser.add_argument("--sentences", type=int, default=2500, help="sentences of one turn")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a batch, on each side")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="+", default=["fp32", "bf16"])
    given = parser.parse_args()
    if given.family is not None:
        family(given.family, given.turns, given.profile)
        return
    if given.pairs is None:
        parser.error("--pairs or --family is required")
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        sample = Path(folder) / "sample.tsv"
        pairs = list(PairFiles(path=given.pairs).read(Report()))
        with sample.open("w", encoding="utf-8") as file:
            for pair in pairs[: given.sentences]:
                file.write(f"{pair.source}\t{pair.target}\n")
        vocabularies = Vocabularies.train(TokenizerConfig(vocab=VOCAB), [PairFiles(path=given.pairs)])
        encoding = pair_encoding(vocabularies, max_tokens=255)
        store = Store.build(Path(folder) / "store", [PairFiles(path=str(sample))], Filters(), encoding)
        packed = PackedBatches(PairItems(store, vocabularies), (512, 512), max(1, given.tokens // 512), seed=1)
        padded = PaddedBatches(PairItems(store, vocabularies), given.tokens, seed=1)
        size = vocabularies.target.size
        print(f"{len(store)} sentences, vocabulary {size}, {given.threads} threads, torch {torch.__version__}")

        runners: dict[str, tuple[type[nn.Module], PackedBatches | PaddedBatches]] = {
            "allyouneed": (Ours, packed),
            "torch.nn.Transformer": (TorchTransformer, padded),
            "transformers Marian": (HuggingFaceMarian, padded),
        }
        for precision in given.precision:
            speeds = measure(runners, size, precision == "bf16", given.turns)
            best_peer = max(statistics.median(v) for k, v in speeds.items() if k != "allyouneed")
            print(f"\n{precision}: real target tokens per second, median of {given.turns} turns (lowest to highest)")
            for name, values in speeds.items():
                median = statistics.median(values)
                spread = f"({min(values):.0f} to {max(values):.0f})"
                print(f"  {name:22s} {median:8.0f} {spread:18s} {median / best_peer:5.2f} × the better peer")


def measure(
    runners: dict[str, tuple[type[nn.Module], PackedBatches | PaddedBatches]], vocab: int, bf16: bool, turns: int
) -> dict[str, list[float]]:
    steps = {name: stepper(make(vocab).train(), bf16) for name, (make, _) in runners.items()}
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(turns + 1):  # the first turn warms up
        for name, (_, batches) in runners.items():
            speed = one_turn(steps[name], batches.batches(turn))
            if turn:
                speeds[name].append(speed)
    return speeds


def one_turn(step: Callable[[Batch], None], batches: Iterator[Batch]) -> float:
    tokens, begin = 0, time.perf_counter()
    for batch in batches:
        step(batch)
        tokens += int(batch.labels.ne(IGNORE).sum())
    return tokens / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
