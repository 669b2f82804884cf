"""A drawing is the same twice, carries its words and data, and takes the page's colours."""

import re
import xml.etree.ElementTree as ET

import pytest
from IPython.core.formatters import DisplayFormatter

from dsv41_edu.figures import style
from dsv41_edu.figures.ledger import LedgerTable
from dsv41_edu.figures.style import canvas, finish
from dsv41_edu.figures.tables import cell, refused, table


def draw(value=1.0, alt="a <line>"):
    with canvas(3, 2) as figure:
        ax = figure.subplots()
        ax.plot([0, value], [0, 1], color=style.BLUE)
        ax.fill_between([0, 1], [0, 1], color=style.FAINT)
        ax.grid(True)
        return finish(figure, alt=alt, caption="a & b", data={"value": value})


def test_two_drawings_are_equal_to_the_byte():
    assert draw() == draw()
    assert draw().digest != draw(2.0).digest
    assert draw().svg != draw(2.0).svg


def test_svg_is_well_formed_and_has_no_fixed_ink():
    svg = draw().svg
    ET.fromstring(svg)
    assert style.INK not in svg
    assert style.FAINT not in svg
    assert "currentColor" in svg
    assert "date" not in svg.lower()
    assert 'aria-label="a &lt;line&gt;"' in svg


def test_ids_of_two_drawings_differ_and_references_resolve():
    one, two = draw().svg, draw(2.0).svg
    ids = [set(re.findall(r'id="([^"]+)"', s)) for s in (one, two)]
    assert not ids[0] & ids[1]
    for svg, known in zip((one, two), ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= known


def test_the_bundle_has_words_for_readers_of_text():
    bundle = draw()._repr_mimebundle_()
    assert bundle["text/plain"] == f"figure: a <line>\ndata {draw().digest}"
    assert "<figcaption>a &amp; b</figcaption>" in bundle["text/html"]


@pytest.mark.parametrize("shown", [draw(), table("n", [(1,)]), LedgerTable([])], ids=["figure", "table", "ledger"])
def test_a_notebook_stores_the_bundle(shown):
    stored, _ = DisplayFormatter().format(shown)
    assert stored == shown._repr_mimebundle_()


def test_what_a_refusal_says():
    def raises(error):
        raise error

    assert refused(lambda: raises(ValueError("x = 1: expected 2"))) == "x = 1: expected 2"
    assert refused(lambda: raises(TypeError("x is int"))) == "x is int"
    assert refused(lambda: None) == "accepted"
    with pytest.raises(KeyError):
        refused(lambda: raises(KeyError()))


def test_tables():
    t = table("name|n", [("a<b", 1234), ("c", 5)])
    bundle = t._repr_mimebundle_()
    assert bundle["text/plain"] == "name      n\na<b   1,234\nc         5"
    assert '<td>a&lt;b</td><td class="number">1,234</td>' in bundle["text/html"]
    assert cell(True) == "True"
    assert cell(0.5) == "0.5"
    with pytest.raises(ValueError, match="has 1 cells, expected 2"):
        table("a|b", [("x",)])
