"""Sizes as evidence says them."""

from __future__ import annotations

import pytest

from gpuwatch.sizes import size_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1020 << 10, "1020 KiB"),
        (2 << 30, "2 GiB"),
        (2**60, "1048576 TiB"),
    ],
)
def test_a_size_has_three_digits_and_no_exponent(number: int, text: str) -> None:
    assert size_text(number) == text
