"""The figures of the drafting chapter draw what they are given, and the slider's page is whole without its script."""

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from dsv41_edu.config import preset
from dsv41_edu.dspark.scheduler import schedule
from dsv41_edu.dspark.simulation import Result
from dsv41_edu.figures import dspark as draw
from dsv41_edu.figures import dspark_serving as serving
from dsv41_edu.figures.dspark_serving import Point

KINDS = ["code", "a<b"]
POINTS = [
    Point(2, [6.0, 4.5], reading=9.0, arithmetic=1.0, step=11.0, throughput=1234.56, user=617.28),
    Point(4000, [2.0, 1.0], reading=12.0, arithmetic=24.0, step=26.0, throughput=100_000.4, user=25.0),
]
CONFIDENCE = np.array([[0.9, 0.8], [0.5, 0.4]])
RATE = 1 / (1 + 0.2 * np.arange(7))
BINS = [{"predicted": 0.2, "observed": 0.1, "count": 3}, {"predicted": 0.9, "observed": 0.8, "count": 30}]


def drawings():
    config = preset("v41_flash")
    result = Result(throughput=1000.0, user_speed=10.0, verified=4.0, tokens=2.0, running=100.0)
    thetas = {"smooth": [1.0, 2.0, 1.5], "staircase": [1.0, 0.5, 1.8]}
    return {
        "lineage": draw.lineage(5),
        "block": draw.block(config),
        "influence": draw.influence({"drafting": np.ones((2, 5)), "verifying": np.tri(2, 5, 3)}, context=3),
        "expected": draw.expected({1: [1.5, 1.9]}, [0.5, 0.9], {1: [1.49, 1.91]}),
        "continuations": draw.continuations({"text": {"of course": 0.5, "of problem": 0.0}}),
        "verifiers": draw.verifiers({1: [0.5], 2: [1.0]}, {1: [0.5], 2: [1.1]}),
        "walk": draw.walk(CONFIDENCE, RATE),
        "staircase": draw.staircase(thetas, {"smooth": 1, "staircase": 0}, {"smooth": 1, "staircase": 2}),
        "load_curves": draw.load_curves({"scheduler": {8: result}, "1 draft": {8: result}}),
        "verified_by_load": serving.verified_by_load(KINDS, POINTS),
        "acceptance": serving.acceptance_by_place({n: [[0.9, 0.05], [0.8, 0.06]] for n in ("a", "b", "c")}),
        "reliability": serving.reliability({"before": BINS, "after": BINS}),
        "step_times": serving.step_times([{"requests": 2, "positions": [2, 4], "seconds": [0.03, 0.04]}]),
    }


@pytest.fixture(scope="module")
def drawn():
    return drawings()


def test_every_figure_is_whole(drawn):
    for name, drawing in drawn.items():
        root = ET.fromstring(drawing.svg)
        assert root.get("aria-label") == drawing.alt, name
        assert drawing.caption, name
        assert json.loads(json.dumps(drawing.data)) == drawing.data, name


def test_the_walk_stops_where_the_scheduler_does(drawn):
    data = drawn["walk"].data
    assert data["stop"] == schedule(CONFIDENCE, RATE).sum() == 3
    assert data["order"] == [[1, 1, 0.9], [1, 2, 0.72], [2, 1, 0.5], [2, 2, 0.2]]  # request, place, survival
    # tokens a second with none, one, ... of 0.9, 0.72, 0.5, 0.2
    tokens = np.array([2, 2.9, 3.62, 4.12, 4.32])
    assert data["rates"] == pytest.approx(tokens / (1 + 0.2 * np.arange(2, 7)), rel=1e-3)


def test_data_of_the_figures(drawn):
    assert drawn["influence"].data["verifying"] == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert drawn["block"].data == {"d": 5120, "g": 5, "n": 4, "window": 128, "targets": 3, "rank": 256}
    assert drawn["expected"].data == {"acceptance": [0.5, 0.9], "g1": [1.5, 1.9], "dots1": [1.49, 1.91]}
    assert drawn["continuations"].data == {"text": {"of course": 0.5, "of problem": 0.0}}
    assert drawn["verifiers"].data["block2"] == [1.1]
    assert drawn["staircase"].data["staircase"] == [[1.0, 0.5, 1.8], 0, 2]
    assert drawn["load_curves"].data["scheduler"] == {"8": [1000.0, 10.0, 4.0]}
    assert drawn["verified_by_load"].data["verified"] == [[6.0, 4.5], [2.0, 1.0]]
    assert drawn["acceptance"].data["b"] == [[0.9, 0.05], [0.8, 0.06]]
    assert drawn["reliability"].data["after"] == BINS
    assert drawn["step_times"].data == [[2, [2, 4], [0.03, 0.04]]]


def test_two_drawings_are_equal_to_the_byte():
    assert draw.walk(CONFIDENCE, RATE) == draw.walk(CONFIDENCE, RATE)
    assert draw.walk(CONFIDENCE, RATE).digest != draw.walk(CONFIDENCE[:, :1], RATE).digest


def page(first: int = 0) -> str:
    return serving.load_slider(KINDS, POINTS, most=6, first=first)._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("first", "widths", "words"),
    [
        (0, [100.0, 75.0, 37.5, 4.2], "2: a step takes 11.0 ms; 1,235 tokens/s in all, 617 a user"),
        (1, [33.3, 16.7, 50.0, 100.0], "4,000: a step takes 26.0 ms; 100,000 tokens/s in all, 25 a user"),
    ],
)
def test_the_slider_shows_its_first_point_without_a_script(first, widths, words):
    html = page(first)
    assert [float(w) for w in re.findall(r"width:([\d.]+)%;background", html)] == widths
    assert f"<output>{words}</output>" in html
    assert f"max='1' value='{first}'" in html


def test_the_sliders_data_are_all_points_in_four_digits():
    html = page()
    stored = json.loads(re.search(r"<script type='application/json'>(.*?)</script>", html)[1])
    assert stored == serving.load_slider(KINDS, POINTS, most=6).data
    assert (stored["kinds"], stored["most"], stored["slowest"]) == (KINDS, 6, 24.0)
    assert stored["points"][0] == {
        "requests": 2, "verified": [6.0, 4.5], "reading": 9.0, "arithmetic": 1.0, "step": 11.0,
        "throughput": 1235.0, "user": 617.3,
    }  # fmt: skip
    assert "a<b" not in html
    assert "<span>a&lt;b</span>" in html


def test_the_slider_asks_for_nothing_outside_and_has_one_labelled_control():
    html = page()
    assert not re.search(r"https?:|src=|href=|fetch|import ", html)
    assert re.search(r"<label>requests at a time <input type='range'", html)
    assert html.count("id='") == html.count("id='dspark-load'") == 1
    assert page() == html


def test_the_script_moves_the_bars(tmp_path, browser):
    """The keys change the words, the bars and what is read out."""
    file = tmp_path / "slider.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{page()}", encoding="utf-8")
    tab = browser.new_page(viewport={"width": 390, "height": 700})
    tab.goto(file.as_uri())
    tab.focus("input")
    tab.keyboard.press("End")
    words = tab.inner_text("p > output")
    widths = tab.eval_on_selector_all(".bars > div > div", "bars => bars.map(b => parseFloat(b.style.width))")
    numbers = tab.eval_on_selector_all(".bars > output", "outputs => outputs.map(o => o.textContent)")
    spoken, wide = tab.get_attribute("input", "aria-valuetext"), tab.evaluate("document.body.scrollWidth")
    tab.close()
    assert words == "4,000: a step takes 26.0 ms; 100,000 tokens/s in all, 25 a user"
    assert widths == pytest.approx([33.3333, 16.6667, 50, 100], rel=1e-4)
    assert numbers == ["2.0", "1.0", "12.0 ms", "24.0 ms"]
    assert spoken == "4,000"
    assert wide <= 390


def test_points_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match="2 kinds at R = 2: expected 1"):
        serving.load_slider(["code"], POINTS, most=6)


def test_text_by_its_writers():
    drawing = serving.written_by([("In", False), (" <the", True), ("\n", True)])
    html = drawing._repr_mimebundle_()["text/html"]
    assert drawing.data == [["In", False], [" <the", True], ["\n", True]]
    assert "3 tokens, 2 of them drafted" in drawing.alt
    assert "&lt;the" in html
    assert html.count("dotted'") + html.count("dotted;") == 2
