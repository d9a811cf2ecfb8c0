"""Screenshots of the page for docs/seeing.md, with the bundled translator and the running example.

PYTHONPATH=tests/support python docs/pictures/seeing.py        # needs Chromium and the extra `test`
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from allyouneed.models import shipped
from browser import Tab, chromium
from served import serving

HERE = Path(__file__).parent
# name: (view and state, language, theme, height)
PICTURES = {
    "use": ("use", "en", "light", 900),
    "walk": ("walk?position=1", "zh", "light", 980),
    "truth": ("truth", "en", "dark", 760),
    "mixing": ("mixing?site=decoder.1.cross&shown=head+4", "en", "dark", 980),
    "why": ("why?answer=2", "zh", "dark", 1000),
    "what-if": ("what_if?mask=1&stack=encoder&rewrite=1", "en", "light", 900),
    "anatomy": ("anatomy?name=transformer-base&other=t5-small", "zh", "light", 1000),
    "lessons": ("lessons?lesson=8", "zh", "light", 900),
}


def main() -> None:
    with chromium() as browser, serving({"translator": shipped()}) as running:
        for name, (view, language, theme, height) in PICTURES.items():
            tab = Tab(browser, running.url, viewport={"width": 1200, "height": height})
            mark = "&" if "?" in view else "?"
            tab.open(f"{running.url}/#/{view}{mark}lang={language}&theme={theme}")
            tab.check()
            path = HERE / f"seeing-{name}.png"
            tab.page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
            tab.context.close()
            print(f"seeing-{name}.png")


if __name__ == "__main__":
    main()
