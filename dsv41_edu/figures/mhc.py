"""Figures of the chapter on hyper-connections."""

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish, significant

COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PINK)


def seesaw(alike: Sequence[float], shortcuts: dict[str, Sequence[float]]) -> Drawing:
    """Pre-norm: cosine of each layer's stream with the next; the shortcut's factor to the last layer, by norm."""
    with canvas(8, 3.2) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(alike, color=style.BLUE, linewidth=1.8)
        left.set(xlabel="layer", ylabel="cosine with the next layer's", ylim=(None, 1.005))
        left.set_title("pre-norm: layers become alike", fontsize=10)
        for (name, values), colour in zip(shortcuts.items(), (style.BLUE, style.ORANGE), strict=True):
            right.plot(values, color=colour, linewidth=1.8, label=name)
        right.set(xlabel="from layer", ylabel="shortcut to the last", yscale="log")
        right.set_title("post-norm: the shortcut fades", fontsize=10)
        right.legend(fontsize=9)
        return finish(
            figure,
            alt="Left, the cosine between successive layers rises towards one with pre-norm. Right, the shortcut "
            "from early layers to the last is whole with pre-norm and loses orders of magnitude with post-norm.",
            caption="The seesaw of one residual stream: late layers add little, or early layers are hardly heard.",
            data={"alike": significant(alike), **{name: significant(v) for name, v in shortcuts.items()}},
        )


def _box(ax: Axes, x: float, y: float, width: float, text: str, colour: str, height: float = 0.7) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="none"))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, color=style.ON_COLOUR)


def seam(n: int, d: int) -> Drawing:
    """One seam around a sublayer F: streams, collapse, F, expand and mix, with shapes."""
    with canvas(8, 3.6) as figure:
        ax = figure.subplots()
        for i in range(n):
            y = 3.5 - 0.55 * i
            ax.plot([0.4, 9.6], [y, y], color=COLOURS[i % len(COLOURS)], linewidth=2.2, zorder=1)
        middle = 3.5 - 0.55 * (n - 1) / 2
        tall = 0.55 * (n - 1) + 0.7
        _box(ax, 5.1, middle - tall / 2, 1.3, f"mix\ncomb\n[{n}, {n}]", style.SKY, tall)
        _box(ax, 7.4, middle - tall / 2, 1.3, f"add\npost\n[{n}]", style.GREEN, tall)
        _box(ax, 1.3, middle - tall / 2, 1.3, f"collapse\npre\n[{n}]", style.ORANGE, tall)
        _box(ax, 3.6, 0.2, 2.6, f"norm, then F\n[{d:,}] to [{d:,}]", style.YELLOW)
        below = middle - tall / 2 - 0.02
        for start, end, bend in (((1.95, below), (3.55, 0.55), (90, 0)), ((6.25, 0.55), (8.05, below), (0, 90))):
            arrow = dict(arrowstyle="->", color=style.INK, linewidth=1.2)
            arrow["connectionstyle"] = "angle,angleA={},angleB={}".format(*bend)
            ax.annotate("", end, start, arrowprops=arrow)
        ax.text(0.4, 4.0, f"{n} streams [{n}, {d:,}]", fontsize=9)
        ax.set(xlim=(0, 10), ylim=(0, 4.3))
        ax.axis("off")
        return finish(
            figure,
            alt=f"{n} horizontal streams pass a seam: they collapse into one input for the sublayer F below, mix "
            "with one another, and each is given F's output.",
            caption="A seam. Where a plain residual has 1, three small maps are made from the streams.",
            data={"n": n, "d": d},
        )


def shift() -> Drawing:
    """Which seam's map collapses for which sublayer, in the multi-pass and in the single-pass form."""
    names = ("attention", "experts", "attention")
    with canvas(8, 3.8) as figure:
        axes = figure.subplots(2, 1)
        for ax, single, title in zip(axes, (False, True), ("multi-pass (V4)", "single-pass (V4.1)"), strict=True):
            ax.plot([0, 10], [2, 2], color=style.INK, linewidth=2.5, zorder=1)
            for s, name in enumerate(names):
                x = 0.9 + 3.1 * s
                _box(ax, x, 1.65, 0.9, f"H{s}", style.SKY)
                _box(ax, x + 1.1, 0.1, 1.3, name, style.YELLOW)
                start = x - 2.65 if single else x + 0.75
                source = f"pre of H{s - 1}" if single and s else "stream 0" if single else f"pre of H{s}"
                arrow = dict(arrowstyle="->", color=style.ORANGE, linewidth=1.6)
                ax.annotate("", (x + 1.35, 0.85), (max(start, 0.1), 1.62), arrowprops=arrow)
                ax.text(x + 2.5, 0.75, source, fontsize=8, ha="left", va="center")
                own = dict(arrowstyle="->", color=style.GREEN, linewidth=1.6)
                ax.annotate("", (x + 2.0, 1.95), (x + 2.0, 0.85), arrowprops=own)
            ax.set_title(title, loc="left", fontsize=10)
            ax.set(xlim=(0, 10.2), ylim=(0, 2.6))
            ax.axis("off")
        return finish(
            figure,
            alt="Two rows of three seams. In the multi-pass row each sublayer's input map comes from its own seam, "
            "in the single-pass row from the seam before, and the first sublayer reads stream 0.",
            caption="The shift by one seam (orange: input map). Output and residual maps (green) stay in place.",
            data={"seams": len(names)},
        )


def gains(
    curves: dict[str, list[list[float]]], x: Sequence[float], xlabel: str, ylabel: str, alt: str, caption: str
) -> Drawing:
    """Gains on a logarithmic axis: name to one curve for each seed; mean as a line, range as a band."""
    with canvas(8, 3.8) as figure:
        ax = figure.subplots()
        for (name, runs), colour in zip(curves.items(), COLOURS, strict=False):
            seeds = np.array(runs)
            ax.plot(x, seeds.mean(0), color=colour, linewidth=1.8, label=name)
            ax.fill_between(x, seeds.min(0), seeds.max(0), color=colour, alpha=0.2, linewidth=0)
        ax.set(xlabel=xlabel, ylabel=ylabel, yscale="log")
        ax.legend(fontsize=9)
        data = {name: [significant(c) for c in runs] for name, runs in curves.items()}
        return finish(figure, alt=alt, caption=caption, data=data)


def polytope(paths: Sequence[np.ndarray]) -> Drawing:
    """The doubly stochastic 3 x 3 matrices, seen in two of their four dimensions, and where Sinkhorn goes.

    paths: for each start, the matrices after each iteration, [iterations, 3, 3].
    """
    corners = np.array([np.eye(3)[list(p)].ravel() for p in permutations(range(3))])
    centre = corners.mean(0)
    even, odd = corners[[0, 3, 4]] - centre, corners[[2, 5, 1]] - centre  # two triangles in planes of their own
    turn = np.exp(2j * np.pi * np.arange(6) / 6)  # seen such that all six stand in a circle
    plane = even.T @ np.c_[turn.real, turn.imag][::2] + odd.T @ np.c_[turn.real, turn.imag][1::2]
    seen = (corners - centre) @ plane
    with canvas(6.5, 4.6) as figure:
        ax = figure.subplots()
        for a, b in combinations(seen, 2):
            ax.plot(*np.array([a, b]).T, color=style.FAINT, linewidth=0.8, zorder=1)
        ax.scatter(*seen.T, color=style.INK, s=22, zorder=3)
        for p, (x, y) in zip(permutations(range(3)), seen, strict=True):
            ax.annotate("".join(map(str, p)), (x, y), (x * 1.12, y * 1.12), fontsize=9, ha="center", va="center")
        ax.scatter(0, 0, marker="+", s=60, color=style.INK, zorder=3)
        for path, colour in zip(paths, COLOURS, strict=False):
            points = (path.reshape(len(path), 9) - centre) @ plane
            ax.plot(*points.T, color=colour, linewidth=1.4, marker="o", markersize=3, zorder=2)
            ax.scatter(*points[-1], color=colour, s=45, zorder=4)
        ax.set_aspect("equal")
        ax.axis("off")
        return finish(
            figure,
            alt="Six corners, the permutations of three streams, joined by lines; coloured paths start outside and "
            "end inside, each within a few steps.",
            caption="The Birkhoff polytope for n = 3: corners are permutations, the cross averages all streams. "
            "Each path is Sinkhorn's from one draw of logits.",
            data=[np.round(path, 4).tolist() for path in paths],
        )


def convergence(errors: dict[str, Sequence[float]], used: int) -> Drawing:
    """Largest |row sum - 1| after each iteration, by the scale of the logits; `used` iterations are deployed."""
    with canvas(8, 3.6) as figure:
        ax = figure.subplots()
        for (name, values), colour in zip(errors.items(), COLOURS, strict=False):
            ax.plot(range(1, len(values) + 1), np.maximum(values, 1e-15), color=colour, linewidth=1.8, label=name)
        ax.axvline(used, color=style.INK, linewidth=1, linestyle=":")
        ax.set(xlabel="iterations", ylabel="largest |row sum - 1|", yscale="log", ylim=(1e-15, 3))
        ax.legend(fontsize=9, title="scale of the logits")
        return finish(
            figure,
            alt="Error of the row sums against iterations: small logits converge to rounding within a few steps, "
            "large ones are far from it after twenty.",
            caption=f"How far the rows get. The dotted line is the {used} iterations that are deployed.",
            data={name: [float(f"{max(v, 1e-15):.2g}") for v in values] for name, values in errors.items()},
        )


def traffic(forms: dict[str, dict[str, int]]) -> Drawing:
    """Elements of d that each form reads and writes in a seam, by what it does; the first is the floor."""
    parts = list(dict.fromkeys(part for form in forms.values() for part in form))
    with canvas(8, 2.6) as figure:
        ax = figure.subplots()
        left = np.zeros(len(forms))
        for part, colour in zip(
            parts, (style.BLUE, style.SKY, style.ORANGE, style.YELLOW, style.GREEN), strict=False
        ):
            widths = np.array([form.get(part, 0) for form in forms.values()])
            ax.barh(list(forms), widths, left=left, color=colour, label=part)
            left += widths
        for y, total in enumerate(left):
            ax.text(total + 0.2, y, f"{total:.0f} d", va="center", fontsize=9)
        ax.invert_yaxis()
        ax.set(xlabel="elements per token, in units of d", xlim=(0, max(left) * 1.1))
        ax.legend(fontsize=8, ncols=len(parts), loc="upper center", bbox_to_anchor=(0.45, 1.25))
        return finish(
            figure,
            alt="Bars of what three forms of a seam read and write: the single pass needs half of separate kernels.",
            caption="What a seam moves, for 4 streams.",
            data=forms,
        )
