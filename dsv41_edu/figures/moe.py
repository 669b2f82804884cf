"""Figures of the chapter on experts and routing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish
from dsv41_edu.moe.statistics import experts_touched, experts_touched_zipf


def routing_steps(affinity: Tensor, bias: Tensor, chosen: Tensor, weights: Tensor) -> Drawing:
    """One token's routing: affinities, affinities with the bias, the choice, the weights. All [E] but chosen, [k]."""
    s, b = affinity.tolist(), bias.tolist()
    picked = chosen.tolist()
    biased = [x + y for x, y in zip(s, b, strict=True)]
    given = dict(zip(picked, weights.tolist(), strict=True))
    panels = [
        ("1  affinity of each expert", s),
        ("2  with the bias: the k largest are chosen", biased),
        ("3  weight: the affinity again, renormalised, scaled", [given.get(e, 0.0) for e in range(len(s))]),
    ]
    with canvas(8, 5.4) as figure:
        axes = figure.subplots(3, 1, sharex=True)
        for ax, (title, values) in zip(axes, panels, strict=True):
            colours = [style.BLUE if e in picked else style.GREY for e in range(len(s))]
            ax.bar(range(len(s)), values, color=colours, width=0.8)
            ax.set_title(title, loc="left", fontsize=10)
        axes[1].axhline(min(biased[e] for e in picked), color=style.RED, linewidth=1, linestyle="--")
        axes[2].set_xlabel("expert")
        return finish(
            figure,
            alt="Three rows of bars over the experts: affinities; affinities plus bias, where a dashed line parts "
            "the chosen from the rest; and the weights, which only the chosen have.",
            caption="One token's routing. The bias decides who is chosen (colour) and has no part in the weights.",
            data={
                "affinity": _rounded(s),
                "biased": _rounded(biased),
                "chosen": picked,
                "weights": _rounded(given.values()),
            },
        )


def violation_curves(curves: dict[str, list[list[float]]], steps: Sequence[int]) -> Drawing:
    """Load violation over training: arm to one curve for each seed; their mean as a line, their range as a band."""
    colours = (style.GREY, style.SKY, style.ORANGE, style.BLUE)
    with canvas(8, 4) as figure:
        ax = figure.subplots()
        for (arm, runs), colour in zip(curves.items(), colours, strict=True):
            seeds = np.array(runs)
            ax.plot(steps, seeds.mean(0), color=colour, linewidth=1.8, label=arm)
            ax.fill_between(steps, seeds.min(0), seeds.max(0), color=colour, alpha=0.2, linewidth=0)
        ax.set(xlabel="training step", ylabel="largest load over the mean, less 1", ylim=(0, None))
        ax.legend(fontsize=9)
        return finish(
            figure,
            alt="Curves of the load violation over training for four ways of balancing; without balancing it stays "
            "high, with a selection bias it falls to near zero.",
            caption="Violation of the mean load over training, mean and range of the seeds.",
            data={arm: [_rounded(c) for c in seeds] for arm, seeds in curves.items()},
        )


def load_maps(maps: dict[str, list[list[float]]]) -> Drawing:
    """Share of the load of each expert (rows) over training (columns, two stored points each), one panel an arm."""
    with canvas(9, 3.2) as figure:
        axes = figure.subplots(1, len(maps), sharey=True)
        for ax, (arm, shares) in zip(axes, maps.items(), strict=True):
            grid = np.array(shares).reshape(-1, 2, len(shares[0])).mean(1).T * len(shares[0])  # 1 is the mean load
            image = ax.pcolormesh(grid, cmap="cividis", vmin=0, vmax=3, edgecolors="face", linewidth=0.3)
            ax.set_title(arm, fontsize=9)
            ax.set_xticks([])
        axes[0].set_ylabel("expert")
        figure.supxlabel("training", fontsize=10)
        figure.colorbar(image, ax=axes, label="load over mean", shrink=0.9)
        return finish(
            figure,
            alt="Heat maps of expert load over training: without balancing a few rows stay bright and many dark; "
            "with a selection bias all rows have the same shade after the first steps.",
            caption="Who works. One row an expert, time to the right; all rows alike is balance.",
            data={arm: [_rounded(row) for row in shares] for arm, shares in maps.items()},
        )


def touched_by_batch(E: int, k: int, knees: dict[str, int]) -> Drawing:
    """Experts that a batch touches, uniform and skewed, and the batch at which reading them stops to matter."""
    batches = [1 << i for i in range(16)]
    series = {"uniform routing": [experts_touched(E, k, b) for b in batches]}
    for exponent in (0.5, 1.0):
        series[f"Zipf, exponent {exponent}"] = [experts_touched_zipf(E, k, b, exponent) for b in batches]
    with canvas(8, 4) as figure:
        ax = figure.subplots()
        for (name, values), colour in zip(series.items(), (style.BLUE, style.GREEN, style.ORANGE), strict=True):
            ax.plot(batches, values, color=colour, linewidth=1.8, label=name)
        for i, (name, batch) in enumerate(knees.items()):
            ax.axvline(batch, color=style.INK, linewidth=1, linestyle=(":", "--")[i % 2])
            ax.text(batch * 0.93, E * (0.06 + 0.09 * i), f"{name}: {batch:,}", fontsize=8, ha="right")
        ax.set_xscale("log", base=2)
        ax.set_xticks(batches[::3], [f"{b:,}" for b in batches[::3]])
        ax.set(xlabel="tokens in the batch", ylabel="experts touched, of " + str(E), ylim=(0, E * 1.03))
        ax.legend(fontsize=9, loc="upper left")
        return finish(
            figure,
            alt=f"Experts touched against batch size: the uniform curve reaches nearly all {E} at a few hundred "
            "tokens, skewed routing later; vertical lines mark where arithmetic takes as long as reading.",
            caption="Past a few hundred tokens a step reads all experts; left of a line reading sets its time.",
            data={"batches": batches, **{n: _rounded(v) for n, v in series.items()}, "knees": knees},
        )


def device_loads(before: Tensor, after: Tensor, labels: tuple[str, str]) -> Drawing:
    """Load of each device before and after replication, over the mean. Both [devices]."""
    with canvas(8, 3) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        shown = [(t / t.mean()).tolist() for t in (before, after)]
        for ax, values, label in zip(axes, shown, labels, strict=True):
            ax.bar(range(len(values)), values, color=style.BLUE, width=0.9)
            ax.axhline(max(values), color=style.RED, linewidth=1, linestyle="--")
            ax.set_title(f"{label}: busiest {max(values):.2f}", fontsize=10)
            ax.set_xlabel("device")
        axes[0].set_ylabel("load over the mean")
        return finish(
            figure,
            alt="Bars of each device's load before and after the hottest experts were replicated: the tallest bar "
            "comes down to near the mean.",
            caption="Load of the devices over their mean. A step ends when the busiest does.",
            data={label: _rounded(values) for label, values in zip(labels, shown, strict=True)},
        )


def modality_curves(one: dict[str, list[float]], two: dict[str, list[float]]) -> Drawing:
    """Violation of the total, text and image loads over steps, with one bias for both and with one for each."""
    colours = {"total": style.GREY, "text": style.BLUE, "image": style.ORANGE}
    with canvas(8, 3.4) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for ax, runs, title in zip(axes, (one, two), ("one bias for all tokens", "one bias a modality"), strict=True):
            for name, colour in colours.items():
                ax.plot(runs[name], color=colour, linewidth=1.6, label=name)
            ax.set_title(title, fontsize=10)
            ax.set_xlabel("balancing step")
        axes[0].set_ylabel("largest load over the mean, less 1")
        axes[0].legend(fontsize=9)
        axes[0].set_ylim(0, None)
        return finish(
            figure,
            alt="Two panels of load violations over steps. With one bias the total becomes balanced, images stay "
            "far from it; with two biases all three curves fall.",
            caption="A balanced total can hide an unbalanced modality; one bias each removes it.",
            data={n: {k: _rounded(v) for k, v in r.items()} for n, r in (("one", one), ("two", two))},
        )


def _rounded(values: Any) -> list[float]:
    return [round(float(v), 4) for v in values]
