"""Steps of the shipped miniature by a clock that is known; what they say of time itself is nobody's test."""

from types import SimpleNamespace

import torch

from dsv41_edu import checkpoint
from dsv41_edu.benchmarks import step_times
from dsv41_edu.dspark.scheduler import schedule, step_rates
from dsv41_edu.generate import MINI


def test_what_is_measured(monkeypatch):
    """A step of w positions takes 10 r + w seconds in round r, and no time is taken of the first round."""
    model = checkpoint.load(MINI, dtype=torch.float32)
    widths, ran, run = range(1, 6), [], model.run
    ticks = iter([t for r in (9, 3, 1, 2) for w in widths for t in (0.0, 10.0 * r + w)])
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    def watched(ids, cache, **options):
        ran.append((tuple(ids.shape), cache.lengths.tolist()))
        return run(ids, cache, **options)

    monkeypatch.setattr(model, "run", watched)
    found = step_times.times(model, 3, rounds=3)
    assert found == {"requests": 3, "positions": [3 * w for w in widths], "seconds": [20.0 + w for w in widths]}
    assert ran == [((3, 64), [0, 0, 0]), *[((3, w), [64, 64, 64]) for w in widths] * 4]
    rates = step_rates(found["positions"], found["seconds"])
    assert schedule([[0.9] * 4] * 3, rates).tolist() == [4, 4, 4]
