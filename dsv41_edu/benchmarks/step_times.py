"""How long a step of the miniature takes, for the scheduler's table: python -m dsv41_edu.benchmarks.step_times

    a step   draft a block after each of R rows, run the model on a row's last token and w - 1 drafts, verify them

So R w positions are in the batch. The state that the steps start from is always the same: prompts of the held-out
text. Takes about a minute and writes the case "latency.step" of book/data/benchmarks.json.
"""

import datetime
import statistics
import time

import torch
from torch import Tensor
from tqdm import tqdm

from dsv41_edu import checkpoint
from dsv41_edu.attention.cache import Cache
from dsv41_edu.benchmarks.harness import RESULTS, machine, write
from dsv41_edu.dspark.verification import block_verify
from dsv41_edu.experiments.mini import heldout
from dsv41_edu.generate import MINI, Chance, possible
from dsv41_edu.model import Transformer

REQUESTS, PROMPT, ROUNDS = (1, 4, 16, 64), 64, 20


def step(model: Transformer, chance: Chance, tokens: Tensor, cache: Cache, width: int) -> None:
    """One of `width` positions a row, after tokens, int64 [R]; the cache stays as it is."""
    draft = chance.draft(model, tokens, cache)
    run = model.run(draft.ids[:, :width], cache, features=True)
    chance.verify(possible(model, run.hidden), draft.ids[:, 1:width], None)


@torch.no_grad()
def times(model: Transformer, requests: int, rounds: int) -> dict:
    """Medians over the rounds: `seconds` of a step with so many `positions`, for so many `requests`."""
    prompts = torch.cat(heldout(PROMPT, requests))
    cache, chance = model.cache(requests, 2 * PROMPT), Chance(0.0, 0, requests, block_verify)
    run = model.run(prompts[:, :-1], cache, features=True)
    cache.commit(run.chunk, torch.full((requests,), PROMPT))
    widths = range(1, model.config.dspark_block_size + 2)
    seconds = {width: [] for width in widths}
    for _ in tqdm(range(rounds + 1), desc=f"{requests} requests", unit="round"):
        for width in widths:
            began = time.perf_counter()
            step(model, chance, prompts[:, -1], cache, width)
            seconds[width].append(time.perf_counter() - began)
    return {
        "requests": requests,
        "positions": [requests * width for width in widths],
        "seconds": [statistics.median(of[1:]) for of in seconds.values()],  # the first round warms up
    }


def main() -> None:
    model = checkpoint.load(MINI, dtype=torch.float32)
    found = [times(model, requests, ROUNDS) for requests in REQUESTS]
    case = {
        "name": "latency.step",
        "work": f"a step of the miniature with its drafter, fp32, {PROMPT} tokens of context",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "steps": found,
    }
    write(RESULTS, [case])


if __name__ == "__main__":
    main()
