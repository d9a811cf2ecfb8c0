"""Random programs, scores and token ids for the native interpreter.

tests/kernels/test_sanitizers.py runs this in a process of its own, where the interpreter is compiled with
AddressSanitizer and UndefinedBehaviorSanitizer.

`python native_fuzz.py COUNT`, or `python native_fuzz.py canary` for a write out of bounds that the sanitizer must find.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

import any_part
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.batch import Rows
from allyouneed.nn.linear.int8 import Int8Linear
from allyouneed.nn.states.paged import BlockPool, PagedStates
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from native_models import build_stored, language_model

SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
WRONG = (-1, 31, 1 << 20, 1 << 31, 1 << 40, -(1 << 62), (1 << 63) - 1)  # token ids


def sanitized_library() -> Any:
    native.TUNING = SANITIZERS  # after -O3
    library = native.wait_for_build()
    assert library is not None, native.status()
    return library


def try_top_k(dice: random.Random) -> None:
    rows, vocab = dice.randint(1, 5), dice.randint(1, 70)
    k = dice.randint(-1, vocab + 1)
    scores = torch.randn(rows, vocab)
    spoiled = dice.random() < 0.2
    if spoiled:
        scores[dice.randrange(rows), dice.randrange(vocab)] = dice.choice([torch.nan, torch.inf, -torch.inf])
    count = dice.choice([0, 1, 5, 200_000]) if dice.random() < 0.1 else dice.randint(0, 5)
    banned = [dice.choice([dice.randrange(vocab), dice.randint(-9, 99), *WRONG]) for _ in range(count)]
    found = native.top_k(scores, k, torch.tensor(banned, dtype=torch.long) if banned else None)
    if not 0 < k <= vocab:
        assert found is None
        return
    assert found is not None
    tokens, log_probs = found
    assert ((tokens >= 0) & (tokens < vocab)).all()
    inside = [number for number in set(banned) if 0 <= number < vocab]
    if not spoiled and k <= vocab - len(inside):
        expected = scores.log_softmax(-1).index_fill(1, torch.tensor(inside, dtype=torch.long), -torch.inf).topk(k)
        torch.testing.assert_close(log_probs, expected.values, rtol=1e-4, atol=1e-4)


def try_program(dice: random.Random, model: Any) -> None:
    executor = cpu_executor(model)
    assert isinstance(executor, CpuExecutor)
    rows = dice.randint(1, 9)
    vocab = 31 if not hasattr(model.config, "vocabs") else model.config.vocabs.target

    def texts(longest: int) -> list[list[int]]:
        return [[dice.randrange(vocab) for _ in range(dice.randint(1, longest))] for _ in range(rows)]

    states = executor.start(Rows.of(texts(40)) if hasattr(model, "encoder") else rows)
    if dice.random() < 0.5:
        states = PagedStates(states, BlockPool(700, dice.choice([1, 2, 8])))
    for step in range(dice.randint(1, 4)):
        new = Rows.of(texts(20)) if step == 0 else Rows(torch.randint(vocab, (rows, 1)))
        wrong = dice.random() < 0.2
        if wrong:
            new.tokens[dice.randrange(rows), 0] = dice.choice(WRONG) if vocab == 31 else vocab
        try:
            hidden = executor.advance(new, states, last=True)
            if dice.random() < 0.3:  # rows that share blocks
                states.select([dice.randrange(rows) for _ in range(rows)])
                hidden = executor.advance(Rows(torch.randint(vocab, (rows, 1))), states)
        except IndexError:
            assert wrong
            return
        executor.head(hidden[:, -1])


def try_lengths(dice: random.Random, model: Any) -> None:
    """Lengths that do not fit what is reserved, as no caller of ours passes them."""
    executor: Any = cpu_executor(model)
    states = executor.start(2)
    executor.advance(Rows(torch.ones(2, 3, dtype=torch.long)), states)
    program, given = executor.decoder, executor.decoder.given
    import ctypes

    starts, lengths = [0, 3], [3, 3]
    dice.choice([starts, lengths])[dice.randrange(2)] = dice.choice([-1, 1 << 20, (1 << 31) - 4, -(1 << 31)])
    held = (ctypes.c_int32 * 2)(*starts), (ctypes.c_int32 * 2)(*lengths)
    tokens = torch.ones(2, 3, dtype=torch.long)
    given.starts, given.lengths, given.tokens = ctypes.addressof(held[0]), ctypes.addressof(held[1]), tokens.data_ptr()
    given.rows, given.time = 2, 3
    assert program.library.run(ctypes.addressof(given)) == 2


def main(count: int) -> None:
    sanitized_library()
    dice = random.Random(0)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    names = [name for name in any_part.CASES if "performer" not in name]
    models: list[Any] = [language_model()]
    stateful = ("mla", "convolution", "lstm", "gru", "dynamic-convolution", "retention", "gated-retention", "rwkv")
    stateful += ("gau", "mixed-chunk", "mssa", "longnet", "lsh", "lsra", "synthesizer", "tensorized")
    first = [next(name for name in names if name.startswith(f"mixer {kind}")) for kind in stateful]
    first += [next(name for name in names if name.startswith(f"channel {kind}")) for kind in ("moe", "rwkv-channel")]
    first += [name for name in names if "shaw" in name or "window(3)" in name or "global(1)" in name][:3]
    first += [name for name in names if name.startswith("mixer attention") and name.endswith(("-xl", "additive"))]
    for name in [*first, *dice.sample(names, 12)]:
        for stored in ("int8", "single"):
            try:
                model: Any = build_stored(name, stored).eval()
            except Exception:  # nothing to quantize
                continue
            if isinstance(cpu_executor(model), CpuExecutor) and model.config.generates:
                models.append(model)
    assert any(isinstance(part, Int8Linear) for part in models[0].modules())
    with torch.inference_mode():
        for _ in range(count):
            try_top_k(dice)
            try_program(dice, dice.choice(models))
            try_lengths(dice, models[0])
    print(f"{count} of each kind, {len(models)} models")


def canary() -> None:
    library = sanitized_library()
    scores, tokens, log_probs = torch.randn(1, 40), torch.empty(4, dtype=torch.long), torch.empty(40)
    library.top_k(scores.data_ptr(), 1, 40, None, 0, 40, 1, tokens.data_ptr(), log_probs.data_ptr())


if __name__ == "__main__":
    canary() if sys.argv[1] == "canary" else main(int(sys.argv[1]))
