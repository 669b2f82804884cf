"""Figures of serving with drafts: a load to drag, what it does without a script, and what a trained drafter shows.

What isn't SVG is plain HTML of ours: it takes the page's colours, asks for nothing outside, and holds the numbers of
its first state already, so that a page whose scripts don't run shows that one.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish, significant


class Point(NamedTuple):
    """One load: R requests; positions verified of a request of each kind; milliseconds and tokens a second."""

    requests: int
    verified: list[float]
    reading: float  # ms of a step that the weights and the cache take, overlapped with
    arithmetic: float  # ms that the products take
    step: float  # ms of the whole step
    throughput: float  # tokens a second, of all
    user: float  # tokens a second, of one


def load_slider(kinds: Sequence[str], points: Sequence[Point], most: int, first: int = 0) -> Drawing:
    """A range input over the points; bars of the positions verified of each kind, 1 to `most`, and of a step's price.

    `first`: the point that is shown before anybody drags. Raises ValueError for points that have other kinds.
    """
    for point in points:
        if len(point.verified) != len(kinds):
            raise ValueError(f"{len(point.verified)} kinds at R = {point.requests}: expected {len(kinds)}, {kinds}")
    shown = points[first]
    slowest = max(max(p.reading, p.arithmetic) for p in points)
    bars = [(kind, v / most, f"{v:.1f}", style.BLUE) for kind, v in zip(kinds, shown.verified, strict=True)]
    bars += [
        (name, ms / slowest, f"{ms:.1f} ms", style.ORANGE)
        for name, ms in (("reading", shown.reading), ("arithmetic", shown.arithmetic))
    ]
    rows = "".join(
        f"<span>{escape(name)}</span><div><div style='width:{100 * share:.1f}%;background:{colour}'></div></div>"
        f"<output>{words}</output>"
        for name, share, words, colour in bars
    )
    data = {"kinds": list(kinds), "most": most, "slowest": slowest, "points": [p._asdict() for p in points]}
    data = json.loads(json.dumps(data), parse_float=lambda digits: significant([float(digits)])[0])
    html = (
        f"<style>{SLIDER_STYLE}</style><div id='dspark-load' role='group' aria-label='Positions verified by load'>"
        f"<p><label>requests at a time <input type='range' min='0' max='{len(points) - 1}' value='{first}' "
        f"aria-valuetext='{shown.requests:,}'></label> <output>{_words(shown)}</output></p>"
        f"<div class='bars'>{rows}</div>"
        f"<script type='application/json'>{json.dumps(data).replace('<', chr(92) + 'u003c')}</script></div>"
        f"<script>{SLIDER_SCRIPT}</script>"
    )
    return Drawing(
        html,
        alt="A slider of the load, with bars of the positions verified of each kind of request and of what a step "
        "takes to read and to compute.",
        caption="Drag the load, or use the arrow keys. Blue: positions verified of a request, of "
        f"{most}. Orange: what a step takes; the longer of the two is its price.",
        data=data,
    )


def _words(point: Point) -> str:
    return (
        f"{point.requests:,}: a step takes {point.step:.1f} ms; {point.throughput:,.0f} tokens/s in all, "
        f"{point.user:.0f} a user"
    )


SLIDER_STYLE = (
    "#dspark-load{max-width:44rem;margin:0 auto;color:inherit}"
    "#dspark-load label{display:flex;flex-wrap:wrap;gap:.6rem;align-items:center}"
    "#dspark-load input{flex:1;min-width:10rem;max-width:100%}"
    "#dspark-load p>output{display:block;min-height:1.6em;font-variant-numeric:tabular-nums}"
    "#dspark-load .bars{display:grid;grid-template-columns:max-content 1fr 4.5rem;gap:.25rem .6rem}"
    "#dspark-load .bars>div{border:1px solid color-mix(in srgb,currentColor 35%,transparent);height:1.1rem}"
    "#dspark-load .bars>div>div{height:100%;max-width:100%}"
    "#dspark-load .bars>output{font-variant-numeric:tabular-nums;text-align:right}"
)
SLIDER_SCRIPT = """(() => {
  const root = document.getElementById("dspark-load");
  const { most, slowest, points } = JSON.parse(root.querySelector("script").textContent);
  const slider = root.querySelector("input"), words = root.querySelector("p > output");
  const bars = root.querySelectorAll(".bars > div > div"), numbers = root.querySelectorAll(".bars > output");
  const whole = (x) => Math.round(x).toLocaleString("en");
  const set = (i, share, text) => {
    bars[i].style.width = 100 * share + "%";
    numbers[i].textContent = text;
  };
  slider.addEventListener("input", () => {
    const p = points[slider.value], kinds = p.verified.length;
    p.verified.forEach((v, i) => set(i, v / most, v.toFixed(1)));
    set(kinds, p.reading / slowest, p.reading.toFixed(1) + " ms");
    set(kinds + 1, p.arithmetic / slowest, p.arithmetic.toFixed(1) + " ms");
    slider.setAttribute("aria-valuetext", whole(p.requests));
    words.textContent = `${whole(p.requests)}: a step takes ${p.step.toFixed(1)} ms; ` +
      `${whole(p.throughput)} tokens/s in all, ${whole(p.user)} a user`;
  });
})();"""


def verified_by_load(kinds: Sequence[str], points: Sequence[Point]) -> Drawing:
    """All the slider's states at once: positions verified of each kind (rows) at each load, and what a step takes."""
    loads = range(len(points))
    with canvas(9, 4.6) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
        grid = np.array([p.verified for p in points]).T
        image = top.pcolormesh(grid, cmap="cividis", vmin=1, edgecolors="face", linewidth=0.3)
        top.set_yticks(np.arange(len(kinds)) + 0.5, kinds, fontsize=8)
        top.invert_yaxis()
        figure.colorbar(image, ax=top, label="positions")
        middle = [i + 0.5 for i in loads]
        for name, colour in (("reading", style.BLUE), ("arithmetic", style.ORANGE)):
            bottom.plot(middle, [getattr(p, name) for p in points], color=colour, linewidth=1.8, label=name)
        shown = [i for i in loads if i % 4 == 0]
        bottom.set_xticks([i + 0.5 for i in shown], [f"{points[i].requests:,}" for i in shown], fontsize=8)
        bottom.set(xlabel="requests at a time", ylabel="ms a step", ylim=(0, None))
        bottom.legend(fontsize=8)
        return finish(
            figure,
            alt="A map of positions verified by kind of text and load: bright at the left, dark at the right, where "
            "texts that are hard to draft darken first. Below, what a step takes to read and to compute.",
            caption="The slider's states side by side: who loses the drafts first as the load grows.",
            data={
                "kinds": list(kinds),
                "requests": [p.requests for p in points],
                "verified": [significant(p.verified) for p in points],
            },
        )


def acceptance_by_place(variants: dict[str, Sequence[Sequence[float]]]) -> Drawing:
    """Of each drafter the chance that a draft stands, those before it standing: of each place [mean, 2 sd]."""
    with canvas(8, 3.6) as figure:
        ax = figure.subplots()
        colours = (style.GREY, style.ORANGE, style.BLUE, style.GREEN, style.INK)
        for i, ((name, rows), colour) in enumerate(zip(variants.items(), colours, strict=False)):
            mean, spread = np.array(rows).T
            places = np.arange(1, len(mean) + 1) + 0.05 * (i - (len(variants) - 1) / 2)
            ax.errorbar(places, mean, spread, color=colour, linewidth=1.8, capsize=3, label=name)
        ax.set(xlabel="place in the block", ylabel="acceptance", ylim=(0, 1), xticks=range(1, len(mean) + 1))
        ax.legend(fontsize=9)
        return finish(
            figure,
            alt="Acceptance against the place in the block of each drafter, with the spread of the seeds.",
            caption="How often a draft stands where those before it did; bars are two standard deviations.",
            data={name: [significant(row) for row in rows] for name, rows in variants.items()},
        )


def reliability(diagrams: dict[str, Sequence[dict[str, float]]]) -> Drawing:
    """Share that stood against the chance promised, of each bin {"predicted", "observed", "count"} of each name."""
    with canvas(8, 4) as figure:
        axes = figure.subplots(1, len(diagrams), sharey=True)
        for ax, (name, bins) in zip(axes, diagrams.items(), strict=True):
            promised, stood, counts = (np.array([b[k] for b in bins]) for k in ("predicted", "observed", "count"))
            ax.plot([0, 1], [0, 1], color=style.INK, linewidth=1, linestyle=":")
            ax.scatter(promised, stood, s=8 + 300 * counts / counts.sum(), color=style.BLUE)
            ax.set_title(name, fontsize=10)
            ax.set(xlabel="chance that was promised", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes[0].set_ylabel("share that stood")
        return finish(
            figure,
            alt="Dots of the share of drafts that stood against the promised chance, before and after calibration, "
            "and the diagonal where both are equal.",
            caption="A promise is kept on the dotted line. Larger dots hold more drafts.",
            data={n: [dict(zip(b, significant(b.values()), strict=True)) for b in v] for n, v in diagrams.items()},
        )


def step_times(steps: Sequence[dict]) -> Drawing:
    """Milliseconds of a step against its positions, a line for each {"requests", "positions", "seconds"}."""
    with canvas(8, 3.6) as figure:
        ax = figure.subplots()
        for step, colour in zip(steps, (style.GREY, style.SKY, style.BLUE, style.INK), strict=False):
            milliseconds = [1e3 * s for s in step["seconds"]]
            label = f"{step['requests']} request{'s' * (step['requests'] > 1)}"
            ax.plot(step["positions"], milliseconds, color=colour, marker="o", markersize=4, label=label)
        ax.set(xlabel="positions in the batch", ylabel="ms a step", xscale="log", ylim=(0, None))
        ticks = [step["positions"][0] for step in steps]
        ax.set_xticks(ticks, ticks)
        ax.minorticks_off()
        ax.legend(fontsize=9)
        return finish(
            figure,
            alt="Milliseconds a step against the positions in the batch, a rising line for each number of requests.",
            caption="Each line begins with no draft verified and ends with the whole block.",
            data=[[step["requests"], step["positions"], significant(step["seconds"])] for step in steps],
        )


def written_by(pieces: Sequence[tuple[str, bool]]) -> Drawing:
    """A text, piece by piece: whether the drafter wrote it and the model only agreed."""
    spans = "".join(
        f"<span style='background:{style.SKY if drafted else style.YELLOW};color:{style.ON_COLOUR};"
        f"border-bottom:2px {'dotted' if drafted else 'solid'};padding:.1em 0'>{escape(text)}</span>"
        for text, drafted in pieces
    )
    drafted = sum(d for _, d in pieces)
    return Drawing(
        f"<p style='white-space:pre-wrap;line-height:1.9'>{spans}</p>",
        alt=f"A text of {len(pieces)} tokens, {drafted} of them drafted.",
        caption="Blue, dotted: drafted and accepted. Yellow, solid: written by the model itself.",
        data=[[text, bool(d)] for text, d in pieces],
    )
