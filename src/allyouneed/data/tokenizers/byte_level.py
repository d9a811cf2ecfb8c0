"""Bytes and the printable characters by which the `tokenizers` library represents them."""

from __future__ import annotations

BYTES = 256


def byte_characters() -> dict[str, int]:
    """ByteLevel's alphabet: a visible Latin-1 byte is its own character, the others map to U+0100 onwards in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(BYTES) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(BYTES + n): byte for n, byte in enumerate(hidden)}


BYTE_OF = byte_characters()


def show_bytes(raw: bytes) -> str:
    """Readable text; a byte that is only part of a character is shown as `<E6>`."""
    shown = ""
    while raw:
        try:
            return shown + raw.decode("utf-8")
        except UnicodeDecodeError as error:
            broken = "".join(f"<{byte:02X}>" for byte in raw[error.start : error.end])
            shown, raw = shown + raw[: error.start].decode("utf-8") + broken, raw[error.end :]
    return shown
