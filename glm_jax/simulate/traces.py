"""Request traces: when requests arrive, how long their prompts and outputs are.

Reads the Azure LLM inference traces (CSV), Mooncake's (JSON lines), and draws traces like theirs.
"""

import csv
import json
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Tokens that a block id of Mooncake's traces stands for.
BLOCK_TOKENS = 512


class Arrival(NamedTuple):
    """One request of a trace.

    Attributes:
        time: Seconds after the first arrival.
        prompt: Prompt tokens, at least 1.
        output: Generated tokens, at least 1.
        blocks: An id of each `BLOCK_TOKENS` prompt tokens, the last ones included even if they are
            fewer: requests that begin with the same ids begin with the same tokens. Empty where a
            trace does not tell.
    """

    time: float
    prompt: int
    output: int
    blocks: Sequence[int] = ()

    def tokens(self) -> Sequence[int]:
        """Return prompt tokens that are alike exactly where the blocks are; 0 where none are known.

        They are even numbers, of no vocabulary: odd ones are left for what is generated.
        """
        tokens = np.repeat(2 * np.array(self.blocks, np.int32), BLOCK_TOKENS)[: self.prompt]
        # A list would be many times as large.
        return array("i", tokens.tobytes() or bytes(tokens.itemsize * self.prompt))


class Lengths(NamedTuple):
    """A trace's kind: arrivals per second, and log-normal lengths by median and sigma of the log.

    Attributes:
        rate: Arrivals per second; the gaps are exponential.
        prompt: (median, sigma, largest) tokens.
        output: (median, sigma, largest) tokens.
    """

    rate: float
    prompt: tuple[float, float, int]
    output: tuple[float, float, int]


# Fitted to the public traces: median, and half the distance of the logs' 16th and 84th percentile.
AZURE_CONV = Lengths(5.53, (1020.0, 0.75, 14050), (129.0, 0.89, 1000))
AZURE_CODE = Lengths(2.57, (1469.0, 1.34, 7437), (13.0, 0.77, 1899))
MOONCAKE = Lengths(3.40, (6909.0, 1.37, 126195), (350.0, 1.13, 2000))


def read_trace(path: str | Path) -> list[Arrival]:
    """Read a trace by its suffix: .csv as Azure's, .jsonl as Mooncake's.

    Raises:
        ValueError: The suffix is another, a field is missing, or there is no request.
    """
    path = Path(path)
    readers = {".csv": _read_azure, ".jsonl": _read_mooncake}
    if path.suffix not in readers:
        raise ValueError(
            f"trace {str(path)!r} ends in {path.suffix!r}; allowed: .csv (Azure: TIMESTAMP, "
            "ContextTokens, GeneratedTokens) and .jsonl (Mooncake: timestamp, input_length, "
            "output_length)."
        )
    try:
        arrivals = readers[path.suffix](path)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"trace {str(path)!r} cannot be read ({type(error).__name__}: {error}). "
            "Give a file in the format of its suffix."
        ) from error
    if not arrivals:
        raise ValueError(f"trace {str(path)!r} holds no request. Give another file.")
    return _from_zero(arrivals)


def _read_azure(path: Path) -> list[Arrival]:
    with path.open(newline="") as lines:
        return [
            # Seven decimals are more than datetime reads.
            Arrival(
                datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for row in csv.DictReader(lines)
        ]


def _read_mooncake(path: Path) -> list[Arrival]:
    with path.open() as lines:
        rows = (json.loads(line) for line in lines if line.strip())
        return [
            Arrival(
                row["timestamp"] / 1e3, row["input_length"], row["output_length"], _blocks_of(row)
            )
            for row in rows
        ]


def _blocks_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the block ids of a line; none where the line has no such field."""
    blocks = tuple(row.get("hash_ids", ()))
    expected = -(-row["input_length"] // BLOCK_TOKENS)
    if blocks and len(blocks) != expected:
        raise ValueError(
            f"{len(blocks)} hash_ids for an input_length of {row['input_length']}; allowed: "
            f"{expected}, one per {BLOCK_TOKENS} tokens"
        )
    return blocks


def generate(kind: Lengths, count: int, seed: int = 0) -> list[Arrival]:
    """Draw a trace of a kind; the same seed gives the same trace."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / kind.rate, count))
    columns = []
    for median, sigma, largest in (kind.prompt, kind.output):
        drawn = np.exp(rng.normal(np.log(median), sigma, count))
        columns.append(np.clip(drawn, 1, largest).astype(int).tolist())
    return _from_zero([Arrival(*row) for row in zip(times.tolist(), *columns, strict=True)])


def speed_up(arrivals: Sequence[Arrival], multiplier: float | int) -> list[Arrival]:
    """Return the same requests arriving `multiplier` times as fast."""
    if not multiplier > 0:
        raise ValueError(f"an arrival multiplier of {multiplier} is not allowed; it must be > 0.")
    return [arrival._replace(time=arrival.time / multiplier) for arrival in arrivals]


def halves(
    arrivals: Sequence[Arrival], most: int | None = None
) -> tuple[list[Arrival], list[Arrival]]:
    """Return the first and the second half of a trace, each from time zero.

    Args:
        arrivals: The trace.
        most: Keep only the first so many requests of each half; their density stays.
    """
    middle = len(arrivals) // 2
    if middle == 0:
        raise ValueError(f"a trace of {len(arrivals)} requests has no halves; give at least 2.")
    return (
        _from_zero(list(arrivals[:middle])[:most]),
        _from_zero(list(arrivals[middle:])[:most]),
    )


def _from_zero(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Order by time, start at zero, and give every request at least one token each way."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.time)
    start = ordered[0].time
    return [
        arrival._replace(
            time=arrival.time - start,
            prompt=max(arrival.prompt, 1),
            output=max(arrival.output, 1),
        )
        for arrival in ordered
    ]
