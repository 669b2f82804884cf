"""The built book."""

from pathlib import Path

import pytest

from tests.conftest import skip

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build" / "html"


@pytest.fixture(scope="session")
def html() -> Path:
    if not (HTML / "index.html").exists():
        skip("the book is not built: make book")
    return HTML
