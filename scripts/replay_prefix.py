"""Replays a trace with block ids through the real scheduler, pages and prefix cache, host-only.

`python -m scripts.replay_prefix TRACE` (Mooncake's JSON lines) first serves one request after the
other with a pool that holds everything: what is found must be within 1 % of what the ids alone
promise. Then it serves all of them at their times, in virtual time on 8 H200, with pools of several
sizes. A hit is a whole page found; shares are of all blocks of all prompts, in pages of one block.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.pages import PagePool
from glm_jax.grid_plan import NODE_PAGES, PREFILL_LADDERS, Limits
from glm_jax.simulate.step_time import H200StepTime
from glm_jax.simulate.traces import BLOCK_TOKENS, Arrival, read_trace
from glm_jax.simulate.virtual_time import Speculation, VirtualRun, VirtualTime

# Blocks that 8 H200 hold beside the weights of GLM-5.3.
NODE_BLOCKS = NODE_PAGES * EngineConfig.page_size // BLOCK_TOKENS
TOLERANCE = 0.01
# Longer than any request takes alone.
HOUR = 3600.0


class CountingPool(PagePool):
    """A page pool that counts pages whose content was there already when they were published.

    Attributes:
        duplicates: Pages that were computed although others with the same content were there.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Start with every page free."""
        super().__init__(num_pages, page_size)
        self.duplicates = 0

    def publish(self, page: int, key: bytes, *, complete: bool = True) -> None:
        """Publish and count."""
        self.duplicates += self.find(key) is not None
        super().publish(page, key, complete=complete)


def ideal(arrivals: Iterable[Arrival]) -> int:
    """Return the blocks at the beginning of prompts that were seen before, by their ids alone."""
    seen: set[int] = set()
    found = 0
    for arrival in arrivals:
        for block in arrival.blocks:
            if block not in seen:
                break
            found += 1
        seen.update(arrival.blocks)
    return found


def serve(
    arrivals: Sequence[Arrival], limits: Limits, pages: int
) -> tuple[VirtualRun, CountingPool]:
    """Serve a trace with a pool of so many pages of one block each."""
    config = EngineConfig(
        max_model_len=max(arrival.prompt + arrival.output for arrival in arrivals)
        + limits.drafts
        + 2,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.budget,
        page_size=BLOCK_TOKENS,
        num_pages=pages,
        decode_widths=limits.widths,
        max_num_partial_prefills=limits.max_num_seqs,
    )
    pool = CountingPool(pages, BLOCK_TOKENS)
    speculation = Speculation(limits.drafts, limits.acceptance)
    grid = limits.fine(PREFILL_LADDERS[0])
    virtual = VirtualTime(config, grid, H200StepTime(), speculation, pool=pool)
    return virtual.run(arrivals), pool


def replay(arrivals: Sequence[Arrival], pages: int) -> dict[str, Any]:
    """Serve a trace at its times; return what was found, and what concurrency and space cost."""
    started = time.perf_counter()
    run, pool = serve(arrivals, Limits(), pages)
    found = sum(run.cached) // BLOCK_TOKENS
    return {
        "hit_ratio": round(found / _blocks(arrivals), 4),
        "evictions": pool.evictions,
        "waits_for_a_page": run.prefix_waits,
        "computed_twice": pool.duplicates,
        "preemptions": run.preemptions,
        "steps": len(run.steps),
        "virtual_seconds": round(run.now),
        "ttft_p50_p99": [round(seconds, 2) for seconds in run.quantiles("ttft")],
        "host_seconds": round(time.perf_counter() - started, 1),
    }


def replay_alone(arrivals: Sequence[Arrival], pages: int) -> dict[str, Any]:
    """Serve one request after the other, one token each; return what was found and the ideal."""
    started = time.perf_counter()
    apart = [
        arrival._replace(time=number * HOUR, output=1) for number, arrival in enumerate(arrivals)
    ]
    run, _ = serve(apart, Limits(max_num_seqs=1, drafts=0, acceptance=1), pages)
    total = _blocks(arrivals)
    return {
        "hit_ratio": round(sum(run.cached) / BLOCK_TOKENS / total, 4),
        "ideal": round(ideal(arrivals) / total, 4),
        "blocks": total,
        "steps": len(run.steps),
        "host_seconds": round(time.perf_counter() - started, 1),
    }


def _blocks(arrivals: Iterable[Arrival]) -> int:
    return sum(len(arrival.blocks) for arrival in arrivals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="JSON lines with hash_ids")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--alone", action="store_true", help="only one after the other")
    options = parser.parse_args()
    arrivals = read_trace(options.trace)[: options.requests]
    if not all(arrival.blocks for arrival in arrivals):
        parser.error(f"{options.trace} has requests without hash_ids; give a trace that has them.")
    # Every block, and the pages of what is generated.
    everything = _blocks(arrivals) + len(arrivals) * 8
    found = {"alone": replay_alone(arrivals, everything)}
    print(json.dumps(found["alone"]), file=sys.stderr, flush=True)
    if not options.alone:
        pools = {"unbounded": everything, "8 GPUs": NODE_BLOCKS, "a tenth": NODE_BLOCKS // 10}
        for name, pages in pools.items():
            found[name] = {"pages": pages, **replay(arrivals, pages)}
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=2))
    alone = found["alone"]
    if abs(alone["hit_ratio"] - alone["ideal"]) > TOLERANCE * alone["ideal"]:
        sys.exit(f"found {alone['hit_ratio']} alone, which is not the ideal {alone['ideal']}")


if __name__ == "__main__":
    main()
