"""The input of a view: a text, an image or a sound, as a request carries it and as a predictor takes it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allyouneed.apps.inspect.views.model import Text, ViewRequest
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.inspect.inside.run import Run
    from allyouneed.infer.predictors.base import Predictor

MOST_TOKENS = 4096  # of a text that is recorded whole
PIXELS = 50_000_000
SOUND_SECONDS = 30  # the window of Whisper
IMAGES = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
INPUT_FIELDS = ("text", "image", "sound", "target", "to", "source")


class InputRequest(ViewRequest):
    """`text`, or `image` or `sound` in base64 (a data: URL is accepted, other URLs and paths are not opened).
    `target`: the answer to follow instead of the model's own. `to`, `source`: languages of a multilingual
    translator."""

    text: Text | None = None
    image: Text | None = None
    sound: Text | None = None
    target: Text | None = None
    to: Text | None = None
    source: Text | None = None

    def input_key(self) -> str:
        given = json.dumps([getattr(self, name) for name in INPUT_FIELDS], ensure_ascii=True)
        return hashlib.sha256(given.encode()).hexdigest()

    def run(self, predictor: Predictor) -> Run:
        """The predictor's recorded run of this input."""
        options = {"target": self.target, "to": self.to, "from_": self.source}
        given = {name: value for name, value in options.items() if value is not None}
        return predictor.inside(self.read(predictor), **given)

    def read(self, predictor: Predictor) -> Any:
        """The input as the predictor takes it."""
        given = [name for name in ("text", "image", "sound") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise UserError(f"expected one input (text, image or sound), found {found}")
        if self.image is not None:
            return read_image(self.image)
        if self.sound is not None:
            return read_sound(self.sound)
        assert self.text is not None
        return check_text(predictor, self.text)


def check_text(predictor: Predictor, text: str) -> str:
    """The text, if it is not empty and not longer than the model reads at once."""
    if not text.strip():
        raise UserError("the text is empty")
    limit = min(predictor.max_input, MOST_TOKENS)
    if len(text) > 64 * limit:  # not even tokenized
        raise UserError(f"the text has {len(text):,} characters; at most {limit:,} tokens can be shown, shorten it")
    tokens = len(predictor.folder.tokenizers.source.encode(text))
    if tokens > limit:
        raise UserError(f"the text has {tokens:,} tokens; at most {limit:,} can be shown, shorten it")
    return text


def _decode(text: str, what: str) -> bytes:
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"{what}: expected base64 or a data: URL (other URLs and paths are not opened)") from None


def read_image(text: str) -> Any:
    """An RGB image."""
    from allyouneed.errors.extras import require

    require("image", "an image")
    from PIL import Image

    raw = _decode(text, "image")
    try:
        image = Image.open(io.BytesIO(raw), formats=IMAGES)
        pixels = image.width * image.height
        if pixels <= PIXELS:
            return image.convert("RGB")
    except Exception:
        raise UserError(f"image: cannot be read (allowed: {', '.join(IMAGES)})") from None
    raise UserError(f"image: {pixels:,} pixels, the limit is {PIXELS:,}")


def read_sound(text: str) -> Any:
    """Samples, 16,000 a second."""
    from allyouneed.data.media.sound_files import read_sound as read

    raw = _decode(text, "sound")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sound"
        path.write_bytes(raw)
        try:
            return read(path, longest=SOUND_SECONDS)
        except UserError as error:
            raise UserError(str(error).replace(str(path), "sound")) from None
