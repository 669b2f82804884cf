"""Every page of the built book, opened from its folder in a browser without a network."""

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def pages() -> list[str]:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [toc["root"]] + [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [f"{file}.html" for file in files]


@pytest.fixture
def visit(browser, html):
    """Open a page; fails at the end where anything failed, asked for the outside or complained."""
    wrong, contexts = [], []

    def visit(page: str, theme: str = "light", width: int = 1400):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, offline=True)
        contexts.append(context)
        tab = context.new_page()
        tab.add_init_script(f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')")
        tab.on("requestfailed", lambda r: wrong.append(f"{page}: failed: {r.url}"))
        tab.on("request", lambda r: wrong.append(f"{page}: asks for {r.url}") if r.url.startswith("http") else None)
        tab.on("console", lambda m: wrong.append(f"{page}: {m.text}") if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(f"{page}: {error}"))
        tab.goto((html / page).as_uri())
        tab.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", [*pages(), "search.html", "genindex.html"])
def test_every_page(visit, page, theme, width):
    tab = visit(page, theme, width)
    assert tab.title()
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    assert tab.evaluate("[...document.images].filter(i => !i.alt || !i.naturalWidth).length") == 0
    assert tab.evaluate("[...document.querySelectorAll('figure.drawing svg')].filter(s => !s.ariaLabel).length") == 0
    # letters must stand out from their ground: the theme's own contrast, not a white box in the dark
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    for box in tab.query_selector_all("div.cell_output .text_html"):
        own = box.evaluate("e => getComputedStyle(e).backgroundColor")
        assert own in ("rgba(0, 0, 0, 0)", "transparent", ground)


def test_math_is_rendered(visit):
    tab = visit("book/notation.html")
    tab.wait_for_selector("mjx-container")
    assert tab.evaluate("document.querySelectorAll('span.math, div.math').length") == tab.evaluate(
        "document.querySelectorAll('.math mjx-container').length"
    )
    assert tab.evaluate("document.querySelectorAll('mjx-merror').length") == 0
    assert tab.evaluate("document.fonts.check('16px MJXTEX')")


def test_search_finds_engram(visit, html):
    tab = visit("book/intro.html")
    tab.goto(f"{(html / 'search.html').as_uri()}?q=Engram")
    tab.wait_for_selector("#search-results li a")
    assert "accounting" in " ".join(a.get_attribute("href") for a in tab.query_selector_all("#search-results li a"))


def test_the_ledger_sorts_filters_and_links(visit, html):
    tab = visit("book/ledger.html")
    rows = "[...document.querySelectorAll('.ledger tbody tr')].filter(r => !r.hidden)"
    first = f"{rows}[0].cells[0].textContent"
    whole = tab.evaluate(f"{rows}.length")
    tab.select_option("[data-column=chapter]", "mhc")
    assert 0 < tab.evaluate(f"{rows}.length") < whole
    assert set(tab.evaluate(f"{rows}.map(r => r.dataset.chapter)")) == {"mhc"}
    tab.fill(".ledger input[type=search]", "sinkhorn")
    assert 0 < tab.evaluate(f"{rows}.length") < 10
    tab.fill(".ledger input[type=search]", "")
    tab.select_option("[data-column=chapter]", "")
    tab.select_option("[data-column=status]", "differs")
    assert set(tab.evaluate(f"{rows}.map(r => r.dataset.status)")) == {"differs"}
    tab.select_option("[data-column=status]", "")
    assert tab.evaluate(f"{rows}.length") == whole
    tab.click(".ledger th button >> nth=0")
    names = tab.evaluate(f"{rows}.map(r => r.cells[0].textContent)")
    assert names[0] == min(names)
    tab.click(".ledger th button >> nth=0")
    assert tab.evaluate(first) == max(names)
    links = tab.query_selector_all(".ledger tbody a")
    targets = {link.get_attribute("href") for link in links}
    for page in {target.split("#")[0] for target in targets}:
        other = visit(f"book/{page}")
        for target in targets:
            if target.startswith(f"{page}#"):
                assert other.query_selector(f"[id='{target.split('#')[1]}']"), target


def test_the_folder_opens_at_the_book(visit, html):
    tab = visit("book/notation.html")
    tab.goto((html / "index.html").as_uri())
    tab.wait_for_url("**/book/intro.html")


def test_glued_numbers_are_in_the_text(html):
    for path in (html / "book").glob("*.html"):
        text = path.read_text()
        assert "{glue" not in text, path
        assert "(763, 205" not in text, path


def test_no_traceback_or_machine_path_is_published(html):
    here = str(ROOT)
    for path in [*(html / "book").glob("*.html"), *(ROOT / "book").glob("*.ipynb")]:
        text = path.read_text()
        assert "Traceback" not in text, path
        assert here not in text, path
        assert json.dumps(here) not in text, path
