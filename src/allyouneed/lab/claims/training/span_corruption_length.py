from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.tasks.language.span_corruption import noise_sizes

LENGTH, DENSITY, SPAN = 512, 0.15, 3.0  # T5's objective


def measure(run: ClaimRun) -> Outcome:
    noise, spans = noise_sizes(LENGTH, DENSITY, SPAN)
    source, target = LENGTH - noise + spans + 1, noise + spans + 1
    curve = {float(n): sum(noise_sizes(LENGTH, DENSITY, n)) / LENGTH for n in (1, 2, 3, 5, 10)}
    return Outcome(
        (
            Figure(("target over text, in tokens", "目标/原文，词元数"), (target / LENGTH,), 0.17, 0.25),
            Figure(
                ("source and target over text and full target", "源加目标/原文加完整目标"),
                ((source + target) / (2 * LENGTH),),
                high=0.6,
            ),
        ),
        {"target over text": curve},
        ("mean length of a span", "share of the text"),
    )


CLAIM = Claim(
    "Raffel et al. 2020, T5, 3.1.4 and 3.3.4",
    (
        "Predicting only the removed spans makes targets a small part of the text, so that a step costs less than "
        "predicting the whole text.",
        "只预测被删去的片段，目标仅为原文的一小部分，因此每步代价低于预测全文。",
    ),
    (
        "Tokens of source and target at 15% in spans of three, as the task makes them, for 512 tokens.",
        "按任务的实际构造，512 个词元、15%、平均片段长 3 时的源与目标词元数。",
    ),
    measure,
)
