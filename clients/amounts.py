"""Amounts as people write them: bytes (`6GB`, `2MB/s`) and shares of a whole (`50%`)."""

import re

from ravnest_fed.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_LONGEST = 40


def parse_bytes(text: str, what: str) -> int:
    """The bytes that `text` names: `6GB` is 6e9, `6GiB` 6 * 2**30. Raises UsageError, which names `what`."""
    found = _BYTES.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    amount = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if amount < 1:
        raise UsageError(f"{what} is {text[:_LONGEST]!r}, which is no amount of bytes", "write it as 500MB or 6GB")
    return amount


def parse_rate(text: str, what: str) -> int:
    """The bytes a second that `text` names, such as `2MB/s`; the `/s` may be left out. Raises UsageError."""
    try:
        return parse_bytes(text.strip().removesuffix("/s"), what)
    except UsageError:
        raise UsageError(
            f"{what} is {text[:_LONGEST]!r}, which is no number of bytes a second", "write it as 500KB/s or 2MB/s"
        ) from None


def parse_share(text: str, what: str) -> float:
    """The share that a percentage names: `50%` is 0.5; above 0 and at most 1. Raises UsageError."""
    found = _SHARE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    share = float(found[1]) / 100 if found else 0.0
    if not 0.0 < share <= 1.0:
        raise UsageError(f"{what} is {text[:_LONGEST]!r}, which is no share", "write 1% to 100%")
    return share
