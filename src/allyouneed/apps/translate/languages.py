"""The languages of a multilingual model, by any of their names, and the special tokens of each direction."""

from __future__ import annotations

from dataclasses import replace

from allyouneed.apps.translate.routes import Route, Routes
from allyouneed.apps.translate.scripts import ChineseScripts
from allyouneed.data.languages import resolve
from allyouneed.errors import UserError, near
from allyouneed.folder import Folder
from allyouneed.infer.frames import Frame, default_frame


class LanguageFrames:
    """The languages of a model by any of their names, and the special tokens of each direction."""

    def __init__(self, folder: Folder, routes: Routes) -> None:
        self.folder, self.routes, self.source = folder, routes, folder.tokenizers.source
        self.languages = sorted(self.source.languages)  # of targets; empty for a model with one target language
        self.scripts = ChineseScripts.of(self.languages, folder.detector)

    @property
    def written_languages(self) -> list[str]:
        """`languages`, and traditional Chinese where answers are converted."""
        chinese = self.scripts.simplified
        return self.languages if chinese is None else sorted([*self.languages, f"{chinese}-Hant"])

    def resolve(self, to: str | None, from_: str | None) -> tuple[str | None, str | None]:
        """The model's codes for language names in any form. Unknown ones are refused before anything is translated."""
        detector = self.routes.detector
        if not self.languages and len(self.folder.directions) == 1:  # no token chooses it
            ((here, there),) = self.folder.directions
            if to is not None:
                resolve(to, [there], "target language")
            if from_ is not None and here is not None:
                resolve(from_, [here], "source language")
            return None, None
        if to is not None and self.languages:
            to = resolve(to, self.languages, "target language", self.written_languages)
        if detector is not None:
            known = sorted({*detector.languages, *(here for here, _ in self.routes.directions if here is not None)})
            return to, None if from_ is None else resolve(from_, known, "source language")
        if from_ is not None and self.languages:
            known = sorted({*self.languages, *(here for here, _ in self.folder.directions if here is not None)})
            from_ = resolve(from_, known, "source language")
        self.frame(to, from_)
        return to, from_

    def frame(self, to: str | None, from_: str | None) -> Frame:
        """The special tokens around every source and at the start of its target, for these languages."""
        known, plain = self.languages, default_frame(self.folder.tokenizers)
        if self.source.template.language is not None:
            return self._language_frame(plain, to, from_)
        if not known:
            if to is not None or from_ is not None:
                raise UserError(f"this model has one target language; remove {to or from_!r}")
            return plain
        if to is None and len(known) > 1:
            raise UserError(f"this model has several target languages; set one: {', '.join(known)}")
        to = to or known[0]
        sources = sorted({source for source, target in self.folder.directions if source and target == to})
        if from_ is not None and from_ not in sources:
            hint = near(from_, sources)
            raise UserError(
                f"this model was not trained to translate from {from_!r} into {to!r}{hint}; from: {sources}"
            )
        return replace(plain, before=(*plain.before, self.source.language(to)))

    def last_of(self, route: Route) -> Frame:
        """The frame of the last direction of a route."""
        return self.frame(route.into[-1], None if self.routes.detector is not None else route.here)

    def _language_frame(self, plain: Frame, to: str | None, from_: str | None) -> Frame:
        """The frame of a model with language tokens on both sides: the source's around it, the target's at its
        start."""
        source, codes = self.source, set(self.source.languages.values())
        begins = next((number for number in (*plain.forced, *plain.opening) if number in codes), None)
        here = source.template.spoken if from_ is None else source.language(from_)
        there = begins if to is None else source.language(to)
        if here is None or there is None:
            what = 'the source language (from_="…")' if here is None else 'the target language (to="…")'
            raise UserError(f"this model has {len(codes)} languages; set {what}: {', '.join(self.languages)}")
        if plain.opening[0] in codes:  # the language token is the begin token
            plain = replace(plain, opening=(there,), forced=())
        else:
            plain = replace(plain, forced=(there,))
        if source.template.language == "before":
            return replace(plain, before=(here, *plain.before))
        return replace(plain, after=(*plain.after, here))
