"""Figures of the chapter on the n-gram memory."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Rectangle

from dsv41_edu.engram.gate import FLOOR
from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish, significant


def pipeline(words: Sequence[str], ids: Sequence[int], columns: int, width: int, n: int, d: int) -> Drawing:
    """From the last four tokens of a text to what is added to the streams, with shapes."""
    words, ids = list(words)[-4:], list(ids)[-4:]
    with canvas(8.5, 5) as figure:
        ax = figure.subplots()

        def box(x: float, y: float, w: float, text: str, colour: str) -> None:
            ax.add_patch(Rectangle((x, y), w, 0.62, facecolor=colour, edgecolor="none"))
            ax.text(x + w / 2, y + 0.31, text, ha="center", va="center", fontsize=8.5, color=style.ON_COLOUR)

        def arrow(x0: float, y0: float, x1: float, y1: float) -> None:
            ax.annotate("", (x1, y1), (x0, y0), arrowprops=dict(arrowstyle="->", color=style.INK, linewidth=1))

        for i, (word, number) in enumerate(zip(words, ids, strict=True)):
            x = 0.1 + 1.5 * i
            box(x, 6.2, 1.35, repr(word)[1:-1], style.GREY)
            box(x, 5.1, 1.35, f"{number:,}", style.SKY)
            arrow(x + 0.67, 6.17, x + 0.67, 5.76)
        for j, order in enumerate((2, 3, 4)):
            x = 0.1 + 2.05 * j
            box(x, 3.7, 1.85, f"hash of the last {order}", style.ORANGE)
            for i in range(4 - order, 4):
                ax.plot([0.77 + 1.5 * i, x + 0.92], [5.08, 4.36], color=style.FAINT, linewidth=1)
            arrow(x + 0.92, 3.68, x + 0.92, 3.2)
        box(0.1, 2.55, 5.95, f"{columns} rows of {width} channels, from one table", style.BLUE)
        arrow(3.07, 2.53, 3.07, 2.05)
        box(0.1, 1.4, 5.95, f"wkv: {columns * width:,} to {n} keys and a value of {d:,}", style.YELLOW)
        arrow(6.08, 1.71, 6.9, 1.71)
        box(6.95, 1.4, 2.9, f"gates [{n}]: keys against streams", style.GREEN)
        arrow(8.4, 2.05, 8.4, 2.53)
        box(6.95, 2.55, 2.9, f"streams [{n}, {d:,}]", style.PINK)
        for y, text in ((6.5, "tokens"), (5.4, "compressed ids")):
            ax.text(6.2, y, text, fontsize=9, va="center")
        ax.set(xlim=(0, 10), ylim=(1.2, 7))
        ax.axis("off")
        return finish(
            figure,
            alt="Four tokens become compressed ids; the last two, three and four are hashed to rows of a table; a "
            "projection makes keys and a value of them, and gates add the value to the streams.",
            caption="The pipeline of one token. All above the projection depends on the ids alone.",
            data={"words": words, "ids": ids, "columns": columns, "width": width, "n": n, "d": d},
        )


def gate_curve(dots: Sequence[float], gates: dict[str, Sequence[float]], limit: float) -> Drawing:
    """Gate against dot, signed root and plain sigmoid; `limit` is the largest |dot| with unit weights."""
    with canvas(8, 3.6) as figure:
        ax = figure.subplots()
        for (name, values), colour in zip(gates.items(), (style.BLUE, style.ORANGE), strict=True):
            ax.plot(dots, values, color=colour, linewidth=1.8, label=name)
        for side in (-limit, limit):
            ax.axvline(side, color=style.INK, linewidth=1, linestyle=":")
        ax.set(xlabel="dot of a stream with its key", ylabel="gate", ylim=(-0.02, 1.02))
        ax.legend(fontsize=9, loc="center right")
        return finish(
            figure,
            alt="The gate rises from near zero to near one; the signed root is steep at zero and slow far from it, "
            "the plain sigmoid is already flat at a tenth of the range.",
            caption="The signed root keeps the gate from saturating. Dotted: the largest dot of unit weights.",
            data={"limit": round(limit, 4), "floor": FLOOR, **{n: significant(v) for n, v in gates.items()}},
        )


def seeds(
    series: dict[str, list[list[float]]], x: Sequence[float], xlabel: str, alt: str, caption: str, logx: bool = False
) -> Drawing:
    """Held-out loss of several seeds, each a dot, their mean a line; one series an arm."""
    with canvas(8, 3.6) as figure:
        ax = figure.subplots()
        for (name, runs), colour in zip(series.items(), (style.BLUE, style.ORANGE, style.GREEN), strict=False):
            values = np.array(runs)  # [points, seeds]
            ax.plot(x, values.mean(1), color=colour, linewidth=1.8, label=name)
            for at, row in zip(x, values, strict=True):
                ax.scatter([at] * len(row), row, color=colour, s=14, alpha=0.7)
        ax.set(xlabel=xlabel, ylabel="held-out loss, nats", xscale="log" if logx else "linear")
        if len(series) > 1:
            ax.legend(fontsize=9)
        data = {"x": list(x), **{name: [significant(r) for r in runs] for name, runs in series.items()}}
        return finish(figure, alt=alt, caption=caption, data=data)


def tiers(served: dict[str, Sequence[float]], sizes: Sequence[int]) -> Drawing:
    """Share of reads that a hot tier serves, by its rows, for each n-gram order."""
    with canvas(8, 3.6) as figure:
        ax = figure.subplots()
        for (name, values), colour in zip(served.items(), (style.BLUE, style.ORANGE, style.GREEN), strict=False):
            ax.plot(sizes, values, color=colour, linewidth=1.8, marker="o", markersize=3, label=name)
        ax.set(xlabel="n-grams in the hot tier", ylabel="share of reads served", xscale="log", ylim=(0, 1))
        ax.legend(fontsize=9)
        return finish(
            figure,
            alt="Curves of the share of reads that a hot tier serves against its size: they rise quickly for pairs, "
            "slower for longer n-grams.",
            caption="What a tier of the most frequent n-grams serves on held-out text.",
            data={"sizes": list(sizes), **{name: significant(v) for name, v in served.items()}},
        )


def passage(tokens: Sequence[str], gates: Sequence[float]) -> Drawing:
    """The gate at each token of a passage."""
    with canvas(9, 3) as figure:
        ax = figure.subplots()
        ax.bar(range(len(tokens)), gates, color=style.BLUE, width=0.85)
        ax.set_xticks(range(len(tokens)), [t.replace("\n", " ") for t in tokens], rotation=90, fontsize=7)
        ax.set(ylabel="gate", ylim=(0, 1), xlim=(-0.6, len(tokens) - 0.4))
        return finish(
            figure,
            alt="Bars of the gate over the tokens of a passage.",
            caption="Where the memory speaks: the mean gate at each token of a held-out passage.",
            data={"tokens": list(tokens), "gates": significant(gates)},
        )
