"""Generates with transformers for scripts/bench_generate.py, in an interpreter of its own.

    python -m scripts.oracle.worker FOLDER THREADS

Prints a JSON line of versions when the model is loaded. Then reads requests from standard input,
one JSON object a line, {"prompts": [[id, ...], ...], "max_tokens": n}, all prompts of one length,
and answers each with {"seconds": s, "tokens": [[id, ...], ...]}: greedy, end-of-text ids ignored.
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


@torch.no_grad()
def generate(
    model: transformers.GlmMoeDsaForCausalLM, prompts: list[list[int]], max_tokens: int
) -> tuple[float, list[list[int]]]:
    """Return the seconds it took and the new tokens of each prompt."""
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return time.perf_counter() - start, tokens[:, ids.shape[1] :].tolist()


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = load_dequantised(folder, DEFAULT)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds, tokens = generate(model, request["prompts"], request["max_tokens"])
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
