"""Generates with transformers for scripts/bench_generate.py, in an interpreter of its own.

    python -m scripts.oracle.worker FOLDER THREADS

Prints a JSON line of versions when the model is loaded. Then reads requests from standard input,
one JSON object a line, {"prompts": [[id, ...], ...], "max_tokens": n}, all prompts of one length,
and answers each with {"tokens": [[id, ...], ...], "times": [s, ...]}: greedy, end-of-text ids
ignored; times are seconds since the request when each new token of all prompts was there.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers

from scripts.oracle.model import load_dequantised

# What a user gets who asks for nothing.
DEFAULT = {"attn_implementation": "sdpa"}


class Stopwatch(transformers.StoppingCriteria):
    """Never stops anything: generate() asks after every token, and the moment is noted."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """Note the time; False for every sequence."""
        self.times.append(time.perf_counter() - self.start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@torch.no_grad()
def generate(
    model: transformers.GlmMoeDsaForCausalLM, prompts: list[list[int]], max_tokens: int
) -> dict[str, list]:
    """Return the new tokens of each prompt, and when they were there."""
    ids = torch.tensor(prompts)
    stopwatch = Stopwatch()
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=transformers.StoppingCriteriaList([stopwatch]),
    )
    return {"tokens": tokens[:, ids.shape[1] :].tolist(), "times": stopwatch.times}


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = load_dequantised(folder, DEFAULT)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(generate(model, **request)), flush=True)


if __name__ == "__main__":
    main()
