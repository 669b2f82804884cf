"""Primes against a sieve and against composites that deceive weaker tests; multipliers against the bound of int64."""

from types import SimpleNamespace

import numpy as np
import pytest

from dsv41_edu.engram.hashing import is_prime, multipliers, primes_from


def test_is_prime_against_a_sieve():
    sieve = [False, False] + [True] * 19_999
    for n in range(2, 142):
        sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    assert [is_prime(n) for n in range(20_001)] == sieve
    assert not any(is_prime(n) for n in range(-20, 0))


@pytest.mark.parametrize(
    "n",
    [
        *(561, 41_041, 825_265, 321_197_185, 5_394_826_801),  # Carmichael: 3, 4, 5, 6, 7 factors
        *(2047, 1_373_653, 25_326_001, 3_215_031_751),  # strong pseudoprimes to the first 1, 2, 3, 4 primes
        *(2_152_302_898_747, 3_474_749_660_383, 341_550_071_728_321),  # ... 5, 6, 7 and 8
        *(3_825_123_056_546_413_051, 318_665_857_834_031_151_167_461),  # ... 9 to 11, and 12
        *(16_000_073, 16_000_093),  # of a demo in circulation that calls them prime
        (2**31 - 1) ** 2,
    ],
)
def test_composites_that_pass_for_primes(n):
    assert not is_prime(n)


def test_large_primes_and_the_bound():
    assert all(is_prime(n) for n in (2**31 - 1, 2**61 - 1, 399_165_290_221, 798_330_580_441))
    with pytest.raises(ValueError, match="n = 3000000000000000000000000: expected less than 3e24"):
        is_prime(3 * 10**24)


def test_primes_from_counts_its_start():
    assert primes_from(53, 3) == [53, 59, 61]
    assert primes_from(54, 1) == [59]
    assert primes_from(0, 2) == [2, 3]
    assert primes_from(10, 0) == []


@pytest.mark.parametrize("size", [1, 2, 97, 1769, 99_092, 129_280, 2**31])
def test_products_fit_whatever_is_drawn(size, monkeypatch):
    """Exactly: with the largest draw in the place of each, no product reaches 2^63, and little room is left."""

    def largest(low, high, size):
        assert (low, type(high)) == (0, int)
        return [high - 1] * size

    monkeypatch.setattr(np.random, "default_rng", lambda seed: SimpleNamespace(integers=largest))
    (m,) = set(multipliers(1, 4, size))
    assert m == 2 * ((2**63 - 1) // size // 2 - 1) + 1
    assert m * (size - 1) < 2**63 <= (m + 4) * size


def test_multipliers_are_odd_and_of_their_layer():
    for size in (1, 97, 99_092):
        found = [multipliers(layer, 4, size) for layer in (1, 14)]
        assert all(m % 2 == 1 for m in found[0] + found[1])
        assert found[0] != found[1]
