"""Amounts as a person writes them."""

import pytest

from clients.amounts import parse_bytes, parse_rate, parse_share
from ravnest_fed.errors import UsageError


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("6GB", 6 * 10**9),
        ("6 gib", 6 * 2**30),
        ("1.5MB", 1_500_000),
        ("500K", 500_000),
        ("700", 700),
        ("3b", 3),
        ("2TiB", 2**41),
    ],
)
def test_bytes(text: str, amount: int) -> None:
    assert parse_bytes(text, "--max-gpu-memory") == amount
    assert parse_rate(f"{text}/s", "--upload-limit") == parse_rate(text, "--upload-limit") == amount


@pytest.mark.parametrize("text", ["", "GB", "-1MB", "6 bananas", "0", "0.1", "1e9", "6Gbit", "6GB/h", "9" * 50])
def test_no_amount(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--max-gpu-memory is .*500MB or 6GB"):
        parse_bytes(text, "--max-gpu-memory")
    with pytest.raises(UsageError, match=r"^--upload-limit is .*2MB/s"):
        parse_rate(text, "--upload-limit")


def test_shares() -> None:
    assert [parse_share(text, "--max-cpu") for text in ("50%", "100 %", "0.5%")] == [0.5, 1.0, 0.005]


@pytest.mark.parametrize("text", ["", "50", "0%", "101%", "-5%", "half", "0.5"])
def test_no_share(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--max-cpu is .*1% to 100%"):
        parse_share(text, "--max-cpu")
