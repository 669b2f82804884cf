"""Text from the model: python -m dsv41_edu.generate --prompt "In the beginning"

    prefill   the whole prompt at once: every layer, or with `replay` the decoder on the last window's tokens alone
    decode    a token a step and row: the largest logit, or a draw from softmax(logits / temperature); with a drafter
              several, of the same law

Rows of a batch have prompts of their own lengths and random numbers of their own, so each row is what it would be
alone. An image token is never drawn: it has no embedding of its own.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from dsv41_edu import checkpoint
from dsv41_edu.attention.cache import Cache
from dsv41_edu.drafter import Draft
from dsv41_edu.dspark.verification import Verified, block_verify, greedy_verify
from dsv41_edu.model import Transformer
from dsv41_edu.vision import merged, span_length

MINI = Path(__file__).parent / "data" / "mini"
Image = tuple[Tensor, int, int]  # patches [rows columns, 3, p, p], rows, columns


@dataclass
class Summary:
    """What a generation took. `touched`: bool [layers, E], the routed experts that some token chose."""

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0  # of the backbone after the prompt
    rows_read: int = 0  # of Engram's tables, repeats counted
    cache_bytes: int = 0
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    touched: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))

    def __str__(self) -> str:
        touched, of = int(self.touched.sum()), self.touched.numel()
        return (
            f"{self.prompt_tokens} prompt tokens in {self.prefill_seconds:.2f} s, then {self.tokens} tokens in "
            f"{self.seconds:.2f} s ({self.tokens / max(self.seconds, 1e-9):.1f} tokens/s); {touched} of {of} experts "
            f"touched, {self.rows_read:,} Engram rows read, {self.cache_bytes:,} bytes of cache"
        )


def check_prompts(model: Transformer, prompts: Sequence[Sequence[int]], more: int) -> None:
    """Raises ValueError for no prompts, an empty one, or one that leaves no room for `more` tokens; MemoryError."""
    most = model.config.max_position_embeddings
    if not prompts or more < 1:
        raise ValueError(f"{len(prompts)} prompts, max_new_tokens = {more}: expected at least 1 of each")
    for row, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= most - more:
            raise ValueError(
                f"prompt {row} of {len(prompt)} tokens: expected 1 to {most - more}, {more} are to follow"
            )
    device, capacity = model.embed.weight.device, max(map(len, prompts)) + more
    needed = Cache(model.config, len(prompts), capacity, model.dtype, "meta").nbytes
    available = checkpoint.available_memory(device)
    if available is not None and needed > available:
        raise MemoryError(
            f"cache of {len(prompts)} x {capacity} tokens: needs {needed:,} bytes, {available:,} available"
        )


def image_rows(model: Transformer, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[Image]]) -> Tensor:
    """What stands for the prompts' image tokens, [tokens, d], in order.

    Raises ValueError where a run of image tokens isn't as long as the spans of the row's next images.
    """
    c, found = model.config, []
    if len(images) != len(prompts):
        raise ValueError(f"images of {len(images)} rows: expected {len(prompts)}, a list for each prompt")
    for row, (prompt, pictures) in enumerate(zip(prompts, images, strict=True)):
        left = [span_length(*merged(c.vision_config, rows, columns)) for _, rows, columns in pictures]
        run = 0
        for at, token in enumerate([*prompt, None]):
            if token == c.image_token_id:
                run += 1
                continue
            begins = at - run
            while run:
                if not left or left[0] > run:
                    raise ValueError(
                        f"prompt {row}: {run} image tokens at {begins} are no whole span: expected "
                        + (f"{left[0]} for the next image" if left else "none, the row has no image left")
                    )
                run, begins = run - left[0], begins + left.pop(0)
        if left:
            raise ValueError(f"prompt {row}: no tokens for {len(left)} of its images, expected spans of {left}")
        found += [model.image_rows(*picture) for picture in pictures]
    return torch.cat(found)


class Chance:
    """What is drawn, row by row: at temperature 0 the largest logit, the lowest id of equals."""

    def __init__(self, temperature: float, seed: int, batch: int, verifier: Callable[..., Verified]):
        """Raises ValueError for a temperature that isn't finite, or is below 0."""
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature = {temperature}: expected a finite number from 0 up")
        self.temperature, self.verifier = temperature, verifier
        # a drafter must not know what its verifier will draw
        self.verifying, self.drafting = (
            [torch.Generator().manual_seed(2 * (seed + b) + i) for b in range(batch)] for i in (0, 1)
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """softmax(logits / temperature) in fp64."""
        return (logits.double() / self.temperature).softmax(-1)

    def draft(self, model: Transformer, token: Tensor, cache: Cache) -> Draft:
        """What the model's drafter proposes after the tokens, int64 [B], the image token never."""
        u = None
        if self.temperature:
            size = model.config.dspark_block_size
            u = torch.stack([torch.rand(size, dtype=torch.float64, generator=g) for g in self.drafting])
            u = u.to(token.device)
        return model.draft(token, cache, self.temperature, u, partial(possible, model))

    def verify(self, logits: Tensor, drafts: Tensor, q: Tensor | None, lengths: Tensor | None = None) -> Verified:
        """How many drafts each row accepts and the token after them, of the model's logits [B, g + 1, V].

        drafts int64 [B, g], from logits q [B, g, V], at temperature 0 not needed; g = 0: the next token. lengths:
        int64 [B], the drafts of each row that are looked at, all if None.
        """
        if self.temperature == 0:
            return greedy_verify(logits, None, drafts, lengths)
        return self.verifier(self.probabilities(logits), self.probabilities(q), drafts, lengths, self.verifying)


@torch.no_grad()
def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    replay: bool = False,
    speculate: bool = False,
    verifier: Callable[..., Verified] = block_verify,
    scheduler: Callable[[np.ndarray], np.ndarray] | None = None,
    stop: int | None = None,
    images: Sequence[Sequence[Image]] | None = None,
    summary: Summary | None = None,
) -> Iterator[list[list[int]]]:
    """The next tokens of each row, a step at a time: one, or with `speculate` what the drafter got through and one.

    A row that has written the id `stop`, or max_new_tokens, gets none. prompts: token ids. seed: row b draws by
    seed + b. verifier: `block_verify` or `rejection_verify`. scheduler: how many drafts of each row to verify,
    integers [B], of confidences, fp64 [B, g]: `schedule` with the rates of steps, or a `Delayed` of its own; None
    verifies all. images: of each row, in order. summary: filled as it goes. Raises ValueError for prompts, images,
    ids and temperatures that don't fit, or a drafter that isn't there, MemoryError for too large a cache.
    """
    c, device, B = model.config, model.embed.weight.device, len(prompts)
    if speculate and model.mtp is None:
        raise ValueError("speculate = True: expected a model with a drafter")
    chance, ahead = Chance(temperature, seed, B, verifier), c.dspark_block_size if speculate else 0
    check_prompts(model, prompts, max_new_tokens + ahead)
    rows = None if images is None else image_rows(model, prompts, images)
    summary = Summary() if summary is None else summary
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest, left = int(lengths.max()), [max_new_tokens] * B
    ids = torch.tensor([[*p, *[c.pad_token_id or 0] * (longest - len(p))] for p in prompts], device=device)
    cache, began = model.cache(B, longest + max_new_tokens + ahead), time.perf_counter()

    def written(drafts: Tensor, accepted: Tensor, token: Tensor) -> list[list[int]]:
        found = []
        for b, (draft, n, last) in enumerate(zip(drafts.tolist(), accepted.tolist(), token.tolist(), strict=True)):
            new = [*draft[:n], last][: left[b]]
            new = new[: new.index(stop) + 1] if stop in new else new
            left[b] = 0 if stop in new else left[b] - len(new)
            summary.tokens += len(new)
            found.append(new)
        summary.seconds = time.perf_counter() - began
        return found

    with Touched(model) as touched:
        run = model.run(ids, cache, lengths, rows, replay=replay, features=speculate)
        cache.commit(run.chunk, lengths)
        hidden = run.hidden[torch.arange(B, device=device), run.last].unsqueeze(1)
        block, q = ids[:, :1], hidden.new_zeros(B, 0, c.vocab_size)
        accepted, token = chance.verify(possible(model, hidden), block[:, 1:], q)
        summary.prompt_tokens, summary.cache_bytes, summary.touched = (
            int(lengths.sum()),
            cache.nbytes,
            touched.experts,
        )
        per_token = model.hasher.primes.numel()
        summary.rows_read = summary.prompt_tokens * per_token
        summary.prefill_seconds, began = time.perf_counter() - began, time.perf_counter()
        yield written(block[:, 1:], accepted, token)
        while any(left):
            block, drafts = token.unsqueeze(1), None  # how many of each row are verified, all if None
            if speculate:
                draft = chance.draft(model, token, cache)
                block, q = draft.ids, draft.logits
                if scheduler is not None:
                    chosen = scheduler(draft.confidence.double().sigmoid().cpu().numpy())
                    drafts = torch.as_tensor(chosen, device=device)
                    block = block[:, : int(drafts.max()) + 1]
                    q = None if q is None else q[:, : block.shape[1] - 1]
            run = model.run(block, cache, None if drafts is None else drafts + 1, features=speculate)
            accepted, token = chance.verify(possible(model, run.hidden), block[:, 1:], q, drafts)
            wanted = torch.tensor(left, device=device)
            cache.commit(run.chunk, torch.minimum(accepted + 1, wanted))  # a last block may have gone further
            summary.steps += 1
            summary.rows_read += int((run.last[wanted > 0] + 1).sum()) * per_token
            yield written(block[:, 1:], accepted, token)


def possible(model: Transformer, hidden: Tensor) -> Tensor:
    """Logits [..., V] without the image token's, which has no embedding of its own."""
    logits = model.logits(hidden)
    if model.config.image_token_id is not None:
        logits[..., model.config.image_token_id] = float("-inf")
    return logits


class Touched:
    """In its block `experts`, bool [layers, E], gathers what the gates choose."""

    def __init__(self, model: Transformer):
        self.gates = [layer.ffn.gate for layer in model.layers]
        self.experts = torch.zeros(len(self.gates), model.config.n_routed_experts, dtype=torch.bool)

    def __enter__(self) -> "Touched":
        def see(layer: int, chosen: Tensor) -> None:
            self.experts[layer, chosen.flatten().cpu()] = True

        self.hooks = [
            gate.register_forward_hook(lambda _, args, out, layer=layer: see(layer, out[1]))
            for layer, gate in enumerate(self.gates)
        ]
        return self

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()


def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options) -> list[list[int]]:
    """All that `stream` gives, a list of ids for each row, the stopping one included."""
    steps = zip(*stream(model, prompts, max_new_tokens, **options), strict=True)
    return [[token for new in row for token in new] for row in steps]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dsv41_edu.generate", description="Write on from a prompt.")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--checkpoint", type=Path, default=MINI, help="a folder in the official layout")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-draft", action="store_true", help="a token a step, although there is a drafter")
    parser.add_argument(
        "--replay", action="store_true", help="run the decoder on the last window of the prompt alone"
    )
    a = parser.parse_args()
    try:
        model = checkpoint.load(a.checkpoint, dtype=torch.float32)
        tokenizer, c, summary = Tokenizer.from_file(str(a.checkpoint / checkpoint.TOKENIZER)), model.config, Summary()
        prompt = [c.bos_token_id, *tokenizer.encode(a.prompt, add_special_tokens=False).ids]
        steps = stream(
            model, [prompt], a.max_new_tokens, temperature=a.temperature, seed=a.seed, replay=a.replay,
            speculate=model.mtp is not None and not a.no_draft, stop=c.eos_token_id, summary=summary,
        )  # fmt: skip
        written, ids = tokenizer.decode(prompt), list(prompt)
        print(written, end="", flush=True)
        bar = tqdm(total=a.max_new_tokens, unit="token", file=sys.stderr, leave=False)
        for (new,) in steps:
            ids += new
            bar.update(len(new))
            so_far = tokenizer.decode(ids)
            if not so_far.endswith("\ufffd"):  # a character's bytes may come in several tokens
                print(so_far[len(written) :], end="", flush=True)
                written = so_far
        bar.close()
    except (ValueError, OSError, MemoryError) as error:
        parser.exit(2, f"{error}\n")
    print(f"\n{summary}", file=sys.stderr)


if __name__ == "__main__":
    main()
