"""Figures of the chapter on the whole model."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Rectangle

from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish, significant


def journey(stations: Sequence[tuple[str, float, float]]) -> Drawing:
    """Parameters multiplied and bytes of weights read by one token, station by station; both in units of 10^6."""
    names, parameters, nbytes = zip(*stations, strict=True)
    y = np.arange(len(names))[::-1]
    with canvas(8.5, 0.42 * len(names) + 0.9) as figure:
        ax = figure.subplots()
        for shift, values, colour, label in (
            (0.19, parameters, style.BLUE, "parameters multiplied, millions"),
            (-0.19, nbytes, style.ORANGE, "bytes of weights, millions"),
        ):
            ax.barh(y + shift, values, height=0.36, color=colour, label=label)
            for at, value in zip(y + shift, values, strict=True):
                ax.text(value * 1.08, at, f"{value:,.4g}", va="center", fontsize=8)
        ax.set(xscale="log", xlim=(max(min(nbytes), 1e-3) / 3, max(parameters) * 12))
        ax.set_yticks(y, names, fontsize=9)
        ax.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1), ncol=2)
        return finish(
            figure,
            alt="Bars of the parameters that a token multiplies and the bytes it reads at each station: the experts "
            "are the longest, attention follows, the memory's rows are the shortest.",
            caption="One decode token through all layers of V4.1-Flash, station by station. Logarithmic.",
            data=[[n, *significant(v)] for n, *v in stations],
        )


def sees(position: int, window: int, roles: dict[str, tuple[int, Sequence[int]]]) -> Drawing:
    """What the query at `position` reads in layers of each role: its window and the entries chosen.

    roles: a name to the ratio of its entries and the chosen ones.
    """
    with canvas(9, 0.75 * len(roles) + 0.9) as figure:
        ax = figure.subplots()
        for row, (ratio, chosen) in enumerate(roles.values()):
            y = len(roles) - row
            ax.add_patch(Rectangle((0, y - 0.3), position + 1, 0.6, facecolor="none", edgecolor=style.FAINT))
            for entry in chosen:
                ax.add_patch(Rectangle((entry * ratio, y - 0.3), ratio, 0.6, facecolor=style.ORANGE, linewidth=0))
            first = max(0, position - window + 1)
            ax.add_patch(Rectangle((first, y + 0.04), position + 1 - first, 0.22, facecolor=style.BLUE, linewidth=0))
        ax.set_yticks([len(roles) - row for row in range(len(roles))], list(roles), fontsize=9)
        ax.set(xlim=(-1, position + 2), ylim=(0.4, len(roles) + 0.6), xlabel="position in the text")
        for name in ("left", "bottom"):
            ax.spines[name].set_visible(False)
        return finish(
            figure,
            alt="A row for each role: all have the window of the last tokens; those with entries also have chosen "
            "spots spread over the text before.",
            caption=f"What the query at position {position} reads: its window (blue) and the chosen entries (orange, "
            "as wide as the tokens they stand for).",
            data={
                "position": position,
                "window": window,
                "roles": {name: [r, [int(i) for i in e]] for name, (r, e) in roles.items()},
            },
        )


def curves(loss: Sequence[float], heldout: Sequence[tuple[int, float]], marks: dict[str, int]) -> Drawing:
    """Training loss by step, smoothed, held-out loss, and where the training changed."""
    smooth = np.convolve(loss, np.ones(25) / 25, mode="valid")
    with canvas(8.5, 3.8) as figure:
        ax = figure.subplots()
        ax.plot(
            np.arange(len(smooth)) + 24, smooth, color=style.BLUE, linewidth=1.4, label="training, mean of 25 steps"
        )
        ax.plot(*zip(*heldout, strict=True), color=style.ORANGE, marker="o", markersize=3, label="held out")
        top = float(max(v for _, v in heldout)) * 1.25
        for name, step in marks.items():
            ax.axvline(step, color=style.INK, linewidth=1, linestyle=":")
            ax.text(step + 8, top * 0.98, name, fontsize=8, va="top")
        ax.set(xlabel="step", ylabel="nats a token", ylim=(min(smooth) * 0.95, top))
        ax.legend(fontsize=9, loc="lower left")
        return finish(
            figure,
            alt="Both losses fall, fast at first; the held-out one follows the training one. Dotted lines mark where "
            "the entries began to be chosen and the weights to be rounded.",
            caption="The miniature's training.",
            data={"loss": significant(smooth[::25]), "heldout": [[s, *significant([v])] for s, v in heldout]},
        )


def contributions(rows: Sequence[tuple[str, float]]) -> Drawing:
    """What the held-out loss gains when a mechanism is switched off in the trained model."""
    names, values = zip(*sorted(rows, key=lambda r: r[1]), strict=True)
    with canvas(8, 0.36 * len(names) + 0.8) as figure:
        ax = figure.subplots()
        ax.barh(names, values, color=[style.BLUE if v >= 0 else style.RED for v in values], height=0.7)
        for at, value in enumerate(values):
            ax.text(max(value, 0) + max(values) * 0.01, at, f"{value:+.3f}", va="center", fontsize=8)
        ax.axvline(0, color=style.INK, linewidth=1)
        ax.set(
            xlabel="held-out loss above the whole model's, nats a token", xlim=(min(0, *values), max(values) * 1.12)
        )
        ax.tick_params(axis="y", labelsize=9)
        return finish(
            figure,
            alt="Bars of how much the loss rises without each mechanism.",
            caption="Each mechanism switched off alone in the trained miniature, without training again.",
            data=[[n, round(v, 3)] for n, v in zip(names, values, strict=True)],
        )


def replayed(positions: Sequence[int], differences: Sequence[float]) -> Drawing:
    """How far the last logits of a bounded replay are from the full pass, by prompt length."""
    with canvas(8, 3.2) as figure:
        ax = figure.subplots()
        ax.plot(positions, differences, color=style.BLUE, marker="o", markersize=3, linewidth=1.5)
        ax.set(xlabel="tokens of the prompt", ylabel="largest difference of a logit", xlim=(0, None), ylim=(0, None))
        return finish(
            figure,
            alt="Zero up to the window's length, then a difference that is there at every length.",
            caption="Bounded replay against the full pass: the same until a decoder window is cut.",
            data={"positions": list(positions), "differences": significant(differences)},
        )
