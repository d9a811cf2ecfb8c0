from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, built, decoder
from allyouneed.lab.probe.run import CONVOLUTION, sample
from allyouneed.lab.probe.task import find
from allyouneed.lab.probe.train import Fit, fit, score


def measure(run: ClaimRun) -> Outcome:
    task, found = find("recall"), dict[str, list[float]]()
    longest = sample(task, task.trained[1])
    mixer = attention(positions="rotary")
    for name, layers, convolved in (("one layer", 1, False), ("one layer behind a convolution", 1, True)):
        tree = decoder(mixer, layers=layers, vocab=task.vocab)
        tree["decoder"] = [CONVOLUTION, *tree["decoder"]] if convolved else tree["decoder"]
        for seed in run.seeds:
            model = built(tree, seed)
            fit(model, sample(task), Fit(steps=run.pick(400, 3), seed=seed, device=run.device), longest)
            found.setdefault(name, []).append(100 * score(model, longest, run.pick(128, 4))[1])
    guess = 100 * 2 / task.trained[1] + 10
    return Outcome(
        (
            Figure(("one layer, %", "一层，%"), tuple(found["one layer"]), high=guess),
            Figure(
                ("one layer behind a short convolution, %", "一层，前有短卷积，%"),
                tuple(found["one layer behind a convolution"]),
                low=90.0,
            ),
        )
    )


CLAIM = Claim(
    "Okpekpe, Orvieto 2025, When Recalling In-Context, Transformers Are Not SSMs (arXiv:2508.19029), 4",
    (
        "A single attention layer stays at chance on associative recall; one behind a short convolution solves it.",
        "单层注意力在联想回忆上停留在随机水平；前面加一个短卷积即可解决。",
    ),
    (
        "Recall of 8 pairs among 16 keys, width 64, 400 steps, three seeds. Guessing one of the values in the text "
        "gives "
        "12%: at most 35%.",
        "16 个键中 8 对的回忆，宽 64，400 步，三个种子。猜测文中出现过的值可得 12%：至多 35%。",
    ),
    measure,
)
