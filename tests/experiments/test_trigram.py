"""Witten and Bell's formulas by hand, and that what they give are probabilities."""

import math

import pytest

from dsv41_edu.experiments.trigram import Trigram

TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2]


def test_by_hand():
    model = Trigram(TEXT, 5)
    one = (3 + 4 / 5) / (9 + 4)  # token 0 three times of nine, four kinds
    assert model.probability(0, ()) == pytest.approx(one)
    assert model.probability(0, (2,)) == pytest.approx((1 + one) / (1 + 1))  # once: the last 2 ends the text
    # after 0 1: 2 twice, 3 once; after 1 alone the same
    p2 = (2 + 4 / 5) / (9 + 4)
    after_1 = (2 + 2 * p2) / (3 + 2)
    assert model.probability(2, (0, 1)) == pytest.approx((2 + 2 * after_1) / (3 + 2))


@pytest.mark.parametrize("context", [(), (1,), (0, 1), (4,), (4, 4), (3, 1), (4, 1)])
def test_probabilities_sum_to_one(context):
    model = Trigram(TEXT, 5)
    assert sum(model.probability(t, context) for t in range(5)) == pytest.approx(1)


def test_an_unseen_context_says_what_the_shorter_one_says():
    model = Trigram(TEXT, 5)
    assert model.probability(2, (4, 1)) == model.probability(2, (1,))
    assert model.probability(2, (4,)) == model.probability(2, ())


def test_nats():
    model = Trigram(TEXT, 5)
    expected = -math.log(model.probability(1, (0,))) - math.log(model.probability(2, (0, 1)))
    assert model.nats([0, 1, 2]) == pytest.approx(expected / 2)
    assert model.nats(TEXT) < math.log(5)
