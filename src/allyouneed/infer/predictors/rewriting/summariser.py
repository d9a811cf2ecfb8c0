"""Summaries of texts of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER
from allyouneed.errors import quote
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import check_texts
from allyouneed.infer.predictors.rewriting.seq2seq import RewriteCandidate, Rewriting, Seq2Seq

Long = Literal["truncate", "windows"]


class Summariser(Seq2Seq):
    """Summarises texts. Of a text longer than those of the training, the beginning is read (`truncate`), or its pieces
    are summarised one by one (`windows`); a note says so."""

    @overload
    def summarise(self, texts: str, **options: Any) -> str: ...

    @overload
    def summarise(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def summarise(self, texts: str | Sequence[str], **options: Any) -> str | list[str]:
        """The summary of a text, or of each of a list. `options`: see `summarise_full`."""
        found = [full.text for full in self.summarise_full([texts] if isinstance(texts, str) else texts, **options)]
        return found[0] if isinstance(texts, str) else found

    def summarise_full(self, texts: Sequence[str], *, long: Long = "truncate", **options: Any) -> list[Rewriting]:
        """The same with scores, notes and, of a text that is read at once, the n best (`best=3`). `options`: see
        `call_options`."""
        many = check_texts(texts, "summarise_full")
        whole = options.get("unlimited") is not None
        windows = [[text] if whole else self.windows(text) for text in many]
        if long == "truncate":
            windows = [some[:1] for some in windows]
        written = iter(self.seq2seq_full([window for some in windows for window in some], **options))
        found = []
        for text, some in zip(many, windows, strict=True):
            parts = [next(written) for _ in some]
            notes = [note for part in parts for note in part.notes]
            if len(some) > 1:
                notes.append(f"{quote(text)}: summarised in {len(some)} pieces of up to {self.room} tokens")
            elif some[0] != text:
                notes += self.truncated(text)[1]
            candidates = parts[0].candidates
            if len(parts) > 1:
                score, finished = sum(part.score for part in parts), all(p.candidates[0].finished for p in parts)
                candidates = [RewriteCandidate(_joined([part.text for part in parts]), score, finished)]
            found.append(Rewriting(text, candidates, notes, parts[0].guesses))
        return found

    def answers(self, texts: Sequence[str], decoding: Decoding | None) -> tuple[list[str], list[str]]:
        found = self.summarise_full(texts, decoding=decoding)
        count = sum(self.windows(text)[0] != text for text in texts)
        notes = [f"{count:,} of {len(texts):,} texts are longer than {self.room} tokens and were truncated"]
        return [full.text for full in found], notes if count else []


def _joined(texts: Sequence[str]) -> str:
    """Sentences after one another, with a space between them unless they are Chinese or Japanese."""
    east_asian = any(EAST_ASIAN_CHARACTER.search(text) for text in texts)
    return ("" if east_asian else " ").join(text.strip() for text in texts)
