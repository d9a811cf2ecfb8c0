"""BLEU and chrF of translations by sacreBLEU, with the signatures that make the numbers comparable.

The same function scores during training and at the end, on detokenized text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allyouneed.data.languages import parse_name
from allyouneed.errors import UserError

RESAMPLES = 1000
WORDS = ("13a", "intl", "zh", "char", "none")  # sacreBLEU's tokenizers that need no download
# these languages are written without spaces; word-level Japanese would need a dictionary (mecab)
TOKENIZE = {"zh": "zh", "ja": "char", "th": "char", "lo": "char", "km": "char", "my": "char"}
DEFAULT_TOKENIZE = "13a"


@dataclass(frozen=True)
class Interval:
    """95 % of the bootstrap resamples score within."""

    low: float
    high: float


@dataclass(frozen=True)
class TranslationScores:
    """BLEU and chrF from 0 to 100 (higher is better) and the share of translations that equal their reference."""

    bleu: float
    chrf: float
    exact: float
    sentences: int
    bleu_signature: str
    chrf_signature: str
    bleu_interval: Interval | None = None
    chrf_interval: Interval | None = None

    def tree(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """A printable summary."""
        return "\n".join(
            [
                f"BLEU  {_number(self.bleu, self.bleu_interval)}  {self.bleu_signature}",
                f"chrF  {_number(self.chrf, self.chrf_interval)}  {self.chrf_signature}",
                f"exact {100 * self.exact:5.1f} %  of {self.sentences} sentence{'s' if self.sentences != 1 else ''}",
            ]
        )


def tokenize_for(language: str | None) -> str:
    """The sacreBLEU tokenizer for this language: `zh-Hant` counts as `zh`; 13a where unknown."""
    return TOKENIZE.get(parse_name(language or "").language, DEFAULT_TOKENIZE)


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[str],
    language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    resamples: int = RESAMPLES,
) -> TranslationScores:
    """Score translations against one reference each. `language`: the target language, which selects the default
    `tokenize`; `resamples=0` omits the 95 % interval (bootstrap over sentences, Koehn 2004; sacreBLEU's fixed seed)."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    class PlainCHRF(CHRF):
        """Scores of resamples are numpy's float32, except 0.0, which is Python's: sacreBLEU cannot average the mix."""

        def _compute_f_score(self, statistics: list[int]) -> float:
            return float(super()._compute_f_score(statistics))

    _check(hypotheses, references)
    words = tokenize or tokenize_for(language)
    if words not in WORDS:
        raise UserError(f"unknown tokenize={words!r} (allowed: {', '.join(WORDS)})")
    bleu, chrf = BLEU(tokenize=words, lowercase=lowercase), PlainCHRF(lowercase=lowercase)
    results = [_score(metric, hypotheses, references, resamples) for metric in (bleu, chrf)]
    same = sum(h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True))
    return TranslationScores(
        bleu=results[0][0],
        chrf=results[1][0],
        exact=same / len(references),
        sentences=len(references),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        bleu_interval=results[0][1],
        chrf_interval=results[1][1],
    )


def _score(
    metric: Any, hypotheses: Sequence[str], references: Sequence[str], resamples: int
) -> tuple[float, Interval | None]:
    result = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=max(1, resamples))
    if resamples < 2:
        return float(result.score), None
    low, high = float(result._mean - result._ci), float(result._mean + result._ci)
    return float(result.score), Interval(max(0.0, low), min(100.0, high))


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise UserError("translations and references must be lists of texts, one entry per sentence")
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} translations but {len(references)} references; line n of one must match line n of "
            "the other: look for missing or extra lines"
        )
    if not references:
        raise UserError("nothing to evaluate: no translations and no references")
    if not any(reference.strip() for reference in references):
        raise UserError("every reference is empty; check the reference file")


def _number(score: float, interval: Interval | None) -> str:
    return f"{score:5.1f}" + (f"  [{interval.low:.1f}, {interval.high:.1f}]" if interval else "")
