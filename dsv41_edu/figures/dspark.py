"""Figures of the chapter on block drafting."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from dsv41_edu.config import ModelConfig
from dsv41_edu.dspark.scheduler import schedule, survival, theta
from dsv41_edu.dspark.simulation import Result
from dsv41_edu.figures import style
from dsv41_edu.figures.style import Drawing, canvas, finish, significant

COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.SKY, style.RED)


def lineage(g: int) -> Drawing:
    """Three ways to draft, one below the other: chained layers, one pass without order, one pass and a chain."""
    with canvas(9, 6.4) as figure:
        heights = 2.0, 2.8, 4.3
        chain, block, spark = figure.subplots(3, 1, height_ratios=heights)
        for ax, height, name in (
            (chain, heights[0], "MTP: a layer and a pass for each draft"),
            (block, heights[1], "DFlash: one pass, no draft knows another"),
            (spark, heights[2], "DSpark: one pass, then each draft told the one before it"),
        ):
            ax.set(xlim=(-0.1, g + 1.1), ylim=(-0.1, height))
            ax.set_title(name, loc="left", fontsize=10)
            ax.axis("off")
        _box(chain, 0, 0, 0.9, "anchor", style.GREY)
        for i in range(1, g + 1):
            _box(chain, i, 1.2, 0.9, f"layer {i}", style.SKY)
            _box(chain, i, 0, 0.9, f"draft {i}", style.ORANGE)
            _arrow(chain, (i - 0.12, 0.62), (i + 0.2, 1.17))
            _arrow(chain, (i + 0.6, 1.18), (i + 0.6, 0.67))
        for ax, first, inputs in (
            (block, 1, ["anchor"] + ["mask"] * g),
            (spark, 0, ["anchor"] + ["noise"] * (g - 1)),
        ):
            for i, word in enumerate(inputs):
                _box(ax, i, 0, 0.9, word, style.GREY if i == 0 else style.YELLOW)
            _box(ax, 0, 0.95, len(inputs) - 0.1, "a few layers, every row sees every row", style.SKY)
            for i in range(g):
                _arrow(ax, (i + first + 0.45, 1.58), (i + first + 0.45, 1.97))
                _box(ax, i + first, 2.0, 0.9, f"draft {i + 1}", style.ORANGE)
        for i in range(g):
            if i:
                _arrow(spark, (i - 0.1, 2.3), (i, 2.3))
            _arrow(spark, (i + 0.45, 2.63), (i + 0.45, 2.97))
            _box(spark, i, 3.0, 0.9, f"chance {i + 1}", style.GREEN)
        spark.plot([3 - 0.05] * 2, [1.8, 3.9], color=style.RED, linewidth=1.5, linestyle="--")
        spark.text(3, 3.95, "the scheduler cuts here, say", fontsize=8.5, ha="center")
        return finish(
            figure,
            alt="Three rows of boxes. MTP chains one layer a draft. DFlash makes all drafts in one pass of rows that "
            "see one another. DSpark does so too, with arrows from each draft to the next and a chance for each.",
            caption="From one pass a draft, to one pass for all, to one pass for all and a cheap chain.",
            data={"drafts": g},
        )


def block(config: ModelConfig) -> Drawing:
    """What flows through the drafter, with the shapes of one request."""
    c = config
    d, g, n, W = c.hidden_size, c.dspark_block_size, c.hc_mult, c.sliding_window
    targets, rank = len(c.dspark_target_layer_ids), c.dspark_markov_rank
    with canvas(9, 4.8) as figure:
        ax = figure.subplots()
        first, last = c.dspark_target_layer_ids[0], c.dspark_target_layer_ids[-1]
        _box(ax, 0, 4.6, 3.6, f"means entering layers {first} to {last}\n[{targets * d:,}]", style.GREY)
        _box(ax, 0, 3.3, 3.6, f"main_proj, main_norm [{d:,}]", style.SKY)
        _box(ax, 0, 2.0, 3.6, f"ring of {W} latents of {c.head_dim} a block", style.PINK)
        _box(ax, 4.2, 4.6, 4.4, f"anchor and {g - 1} noise ids [{g}]", style.YELLOW)
        _box(ax, 4.2, 3.3, 4.4, f"embedding, {n} streams [{g}, {n}, {d:,}]", style.SKY)
        _box(
            ax, 4.2, 2.0, 4.4,
            f"{c.num_nextn_predict_layers} blocks: attention, {c.dspark_num_experts_per_tok} of "
            f"{c.dspark_n_routed_experts} experts", style.BLUE,
        )  # fmt: skip
        _box(ax, 4.2, 0.7, 4.4, f"x: the streams collapsed [{g}, {d:,}]", style.SKY)
        _box(ax, 9.2, 0.7, 4.0, f"norm, the backbone's head [{g}, {c.vocab_size:,}]", style.ORANGE)
        _box(ax, 9.2, 2.0, 4.0, f"+ H E[draft before], rank {rank}", style.RED)
        _box(ax, 9.2, 3.3, 4.0, f"drafts, one after the other [{g}]", style.ORANGE)
        _box(ax, 9.2, 4.6, 4.0, f"w . [x, E[draft before]]\nconfidence [{g}]", style.GREEN)
        for x in (1.8, 6.4):
            for y in (4.57, 3.27, 1.97):
                if x > 2 or y > 2:
                    _arrow(ax, (x, y), (x, y - 0.6))
        for y in (1.35, 2.65, 3.95):
            _arrow(ax, (11.2, y), (11.2, y + 0.6))
        _arrow(ax, (3.63, 2.3), (4.17, 2.3))
        _arrow(ax, (8.63, 1.0), (9.17, 1.0))
        for x, words in ((1.8, "kept: the context"), (6.4, "new in each step"), (11.2, "what comes out")):
            ax.text(x, 5.45, words, fontsize=9, ha="center")
        ax.set(xlim=(-0.1, 13.4), ylim=(0.5, 5.8))
        ax.axis("off")
        return finish(
            figure,
            alt="Boxes of the drafter: means of the last layers' streams fill a ring; an anchor and noise ids are "
            "embedded and go through a few blocks that read the ring; a head, a Markov term and a confidence follow.",
            caption="The drafter and its shapes, for one request. Only the ring is kept from step to step.",
            data={"d": d, "g": g, "n": n, "window": W, "targets": targets, "rank": rank},
        )


def influence(panels: dict[str, ArrayLike], context: int) -> Drawing:
    """Who changes whom: of each panel bool [rows of the block, context + rows], measured by changing one input."""
    with canvas(9, 2.7) as figure:
        axes = figure.subplots(1, len(panels), sharey=True)
        for ax, (name, seen) in zip(axes, panels.items(), strict=True):
            seen = np.asarray(seen)
            for (row, column), yes in np.ndenumerate(seen):
                colour = (style.PINK if column < context else style.BLUE) if yes else "none"
                ax.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, facecolor=colour, edgecolor="none"))
                ax.add_patch(Rectangle((column, row), 1, 1, facecolor="none", edgecolor=style.FAINT, linewidth=0.6))
            rows = len(seen)
            ax.set(xlim=(0, context + rows), ylim=(rows, 0), aspect="equal")
            words = [f"t-{context - 1 - i}" if i < context - 1 else "t" for i in range(context)]
            ax.set_xticks(
                np.arange(context + rows) + 0.5,
                [*words, *(f"+{i + 1}" for i in range(rows))],
                fontsize=7,
                rotation=90,
            )
            ax.set_yticks(np.arange(rows) + 0.5, [f"+{i + 1}" for i in range(rows)], fontsize=8)
            ax.set_title(name, fontsize=10)
            ax.set_xlabel("changed")
        axes[0].set_ylabel("row that moves")
        return finish(
            figure,
            alt="Two grids of which input moves which row. While drafting all of the grid is full; while verifying "
            "the part of the block is a triangle.",
            caption="Measured: a filled cell is an input whose change moves the row. Pink: context; blue: the block.",
            data={name: np.asarray(seen).astype(int).tolist() for name, seen in panels.items()},
        )


def expected(
    formula: dict[int, Sequence[float]], acceptance: Sequence[float], dots: dict[int, Sequence[float]]
) -> Drawing:
    """Tokens a step against acceptance: block length to a curve, and to what a simulation counted."""
    with canvas(8, 3.8) as figure:
        ax = figure.subplots()
        for (g, tokens), colour in zip(formula.items(), COLOURS, strict=False):
            ax.plot(acceptance, tokens, color=colour, linewidth=1.8, label=f"{g} draft{'s' * (g > 1)}")
            ax.scatter(acceptance, dots[g], color=colour, s=22, zorder=3)
        ax.set(xlabel="acceptance of a draft", ylabel="tokens a step", ylim=(0.9, None))
        ax.legend(fontsize=9)
        return finish(
            figure,
            alt="Curves of tokens a step against acceptance for several block lengths, with simulated dots on them; "
            "longer blocks pay only where acceptance is high.",
            caption="Expected tokens a step: the formula (lines) and a simulation (dots).",
            data={
                "acceptance": significant(acceptance),
                **{
                    f"{kind}{g}": significant(v) for kind, s in (("g", formula), ("dots", dots)) for g, v in s.items()
                },
            },
        )


def continuations(laws: dict[str, dict[str, float]]) -> Drawing:
    """Chance of each continuation under each law, a group of bars a law."""
    with canvas(8, 3.2) as figure:
        ax = figure.subplots()
        pairs = list(next(iter(laws.values())))
        for i, (pair, colour) in enumerate(zip(pairs, COLOURS, strict=False)):
            x = np.arange(len(laws)) + (i - (len(pairs) - 1) / 2) * 0.2
            values = [law[pair] for law in laws.values()]
            ax.bar(x, values, 0.18, color=colour, label=pair)
            for at, value in zip(x, values, strict=True):
                ax.text(at, value + 0.01, f"{value:.2f}", ha="center", fontsize=8)
        ax.set_xticks(range(len(laws)), list(laws))
        ax.set(ylabel="chance", ylim=(0, 0.68))
        ax.legend(fontsize=9, ncols=len(pairs), loc="upper center")
        return finish(
            figure,
            alt="Bars of the chance of four continuations: the text and the Markov head know two of them, the "
            "parallel drafter gives a quarter to each, the two nonsense ones included.",
            caption="What follows. Drafted apart, two right words make a wrong pair half of the time.",
            data={name: dict(zip(law, significant(law.values()), strict=True)) for name, law in laws.items()},
        )


def verifiers(token: dict[int, Sequence[float]], block: dict[int, Sequence[float]]) -> Drawing:
    """Drafts accepted on average by the block against token by token: block length to a dot a problem."""
    with canvas(5.4, 4.4) as figure:
        ax = figure.subplots()
        most = max(max(v) for v in block.values()) * 1.05
        ax.plot([0, most], [0, most], color=style.INK, linewidth=1, linestyle=":")
        for g, colour in zip(token, COLOURS, strict=False):
            ax.scatter(token[g], block[g], color=colour, s=14, label=f"{g} draft{'s' * (g > 1)}")
        ax.set(xlabel="accepted, token by token", ylabel="accepted, by the block", aspect="equal")
        ax.legend(fontsize=9)
        return finish(
            figure,
            alt="Dots of accepted drafts by the block against token by token: on the diagonal for one draft, on or "
            "above it for more.",
            caption="Two exact verifiers on drawn problems. On the dotted line they accept equally often.",
            data={f"{n}{g}": significant(v) for n, s in (("token", token), ("block", block)) for g, v in s.items()},
        )


def walk(confidence: ArrayLike, step_rate: ArrayLike) -> Drawing:
    """Algorithm 1 slot by slot: the survivals in its order, tokens a second after each, and where it stops."""
    survivals, rate = survival(confidence), np.asarray(step_rate, dtype=np.float64)
    R, g = survivals.shape
    rates = theta(survivals, rate)
    b = int(schedule(confidence, rate).sum())
    order = sorted((-survivals[r, j], j, r) for r in range(R) for j in range(g))[: len(rates) - 1]
    with canvas(9, 4.8) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        for slot, (minus, j, r) in enumerate(order):
            top.bar(slot + 1, -minus, color=COLOURS[r], width=0.85, alpha=1.0 if slot < b else 0.35)
            top.text(slot + 1, 0.02 - minus, str(j + 1), ha="center", fontsize=8)
        for r in range(R):
            top.bar(0, 0, color=COLOURS[r], label=f"request {r + 1}")
        top.set(ylabel="survival", ylim=(0, 1.12))
        top.legend(fontsize=9, ncols=R, loc="upper right")
        bottom.plot(range(len(rates)), rates, color=style.INK, linewidth=1.2, marker="o", markersize=4)
        bottom.set(
            xlabel="drafts verified, all requests together", ylabel="tokens a second", xticks=range(len(rates))
        )
        for ax in (top, bottom):
            ax.axvline(b + 0.5, color=style.RED, linewidth=1.2, linestyle="--")
        return finish(
            figure,
            alt="Bars of survivals in falling order, coloured by request, with the draft's place above; below them "
            "the tokens a second with so many drafts verified, which rise to a dashed line and fall behind it.",
            caption="The walk. Digits are places in a block; left of the dashed line is verified.",
            data={
                "order": [[r + 1, j + 1, float(f"{-minus:.4g}")] for minus, j, r in order],
                "rates": significant(rates),
                "stop": b,
            },
        )


def staircase(curves: dict[str, ArrayLike], walks: dict[str, int], searches: dict[str, int]) -> Drawing:
    """Tokens a second against drafts verified, of each cost curve, with the walk's stop and the search's best."""
    with canvas(8, 3.8) as figure:
        ax = figure.subplots()
        for (name, rates), colour in zip(curves.items(), (style.BLUE, style.ORANGE), strict=True):
            rates = np.asarray(rates)
            ax.plot(rates, color=colour, linewidth=1.6, label=name)
            ax.scatter(walks[name], rates[walks[name]], marker="X", s=90, color=colour, edgecolor=style.INK, zorder=4)
            ax.scatter(searches[name], rates[searches[name]], s=70, color=colour, edgecolor=style.INK, zorder=3)
        ax.set(xlabel="drafts verified, all requests together", ylabel="tokens a second", ylim=(0, None))
        ax.legend(fontsize=9, loc="lower right")
        return finish(
            figure,
            alt="Tokens a second against drafts verified: a smooth hill, and the same with stairs. The cross of the "
            "walk is at the top of the smooth hill, but at the first edge of the stairs.",
            caption="Cross: where the walk stops. Dot: the best of the whole curve.",
            data={n: [significant(r), walks[n], searches[n]] for n, r in curves.items()},
        )


def load_curves(runs: dict[str, dict[int, Result]]) -> Drawing:
    """Throughput against a user's speed, positions verified against load; policy to load to result, ours first."""
    with canvas(9.5, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        for (name, by_load), colour in zip(runs.items(), (style.INK, *COLOURS), strict=False):
            line = dict(
                color=colour, linewidth=2.4 if name == "scheduler" else 1.4, marker="o", markersize=3, label=name
            )
            results = by_load.values()
            left.plot([r.user_speed for r in results], [r.throughput / 1e3 for r in results], **line)
            right.plot(list(by_load), [r.verified for r in results], **line)
        left.set(xlabel="tokens a second of a user", ylabel="thousand tokens a second, all users", xlim=(0, None))
        right.set(xlabel="requests at a time", ylabel="positions verified of a request", xscale="log", ylim=(0, 6.4))
        left.legend(fontsize=8.5)
        return finish(
            figure,
            alt="Left, throughput against the speed of a user for six policies: the scheduler's curve encloses the "
            "others. Right, positions verified against load: flat lines for fixed choices, a falling one for the "
            "scheduler.",
            caption="The same engine under growing load, one line a policy.",
            data={
                name: {
                    str(load): significant((r.throughput, r.user_speed, r.verified)) for load, r in by_load.items()
                }
                for name, by_load in runs.items()
            },
        )


def _box(ax: Axes, x: float, y: float, w: float, words: str, colour: str) -> None:
    ax.add_patch(Rectangle((x, y), w, 0.62, facecolor=colour, edgecolor="none"))
    ax.text(x + w / 2, y + 0.31, words, ha="center", va="center", fontsize=8.5, color=style.ON_COLOUR)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=style.INK, linewidth=1))
