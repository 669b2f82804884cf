"""`python -m dsv41_edu.experiments` finds the experiments, runs those named, writes in the order of their jobs."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dsv41_edu.experiments import __main__ as command


def test_every_experiment_has_what_the_command_calls():
    found = command.collect()
    names = "balancing engram_budget engram_use engram_zipf indexer mhc_depth mini_drafter mini_peers modality"
    assert list(found) == names.split()
    for module in found.values():
        assert all(isinstance(job, tuple) for job in module.jobs())
        assert module.run.__module__ == module.__name__  # another process can import it
        assert module.RESULT.is_file()


@pytest.fixture
def fakes(monkeypatch):
    written = {}

    def fake(name):
        return SimpleNamespace(
            jobs=lambda: [(1,), (2,), (3,)], run=lambda n: 10 * n, write=lambda r: written.update({name: r})
        )

    monkeypatch.setattr(command, "collect", lambda: {"one": fake("one"), "two": fake("two")})
    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(2))
    return written


@pytest.mark.parametrize(("names", "expected"), [([], ["one", "two"]), (["tw"], ["two"])])
def test_runs_what_is_named(fakes, monkeypatch, names, expected):
    monkeypatch.setattr(sys, "argv", ["experiments", *names])
    command.main()
    assert fakes == {name: [10, 20, 30] for name in expected}


def test_refuses_an_unknown_name(fakes, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", "three"])
    with pytest.raises(SystemExit):
        command.main()
    assert "expected one, two" in capsys.readouterr().err
    assert not fakes
