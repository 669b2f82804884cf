"""One thread for torch in each worker, which share the cores: more would only wait for one another. One browser."""

import os
import shutil

import pytest
import torch

torch.set_num_threads(1)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def skip(reason: str):
    """Skip with the reason; in CI nothing may be skipped."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def browser():
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        skip("no browser for the page tests: apt-get install chromium, or set CHROMIUM to a Chromium or Chrome")
    from playwright.sync_api import sync_playwright

    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=path, args=[*flags.split(), "--disable-component-update", "--disable-sync"]
        )
        yield running
        running.close()
