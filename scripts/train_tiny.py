"""Train, export and evaluate the small model that is shipped with glm-jax.

    python scripts/train_tiny.py --run RUN --minutes 106   train, or go on where RUN stands
    python scripts/train_tiny.py --run RUN --export        write the Hugging Face checkpoint
    python scripts/train_tiny.py --run RUN --evaluate      measure it and write its card

RUN is a folder for the checkpoint (saved every 4 minutes), the tokenizer and the log. --model is
the folder of the Hugging Face checkpoint, by default the one in the package.

On CPU, page faults of temporaries cost up to nine times the arithmetic. The script therefore starts
itself again with glibc told to keep freed memory (MALLOC_* below). It starts itself once more,
without that, for the phase of long rows: its temporaries of gigabytes leave holes in such a heap,
which grew to 23 GB in twelve steps. Without, the phase holds at most 10 GB and is no slower.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from scripts.tiny.checkpoint import CHECKPOINT, load_checkpoint  # noqa: E402
from scripts.tiny.corpus import read_corpus  # noqa: E402
from scripts.tiny.export import export_model  # noqa: E402
from scripts.tiny.phases import Budget  # noqa: E402
from scripts.tiny.report import evaluate_model  # noqa: E402
from scripts.tiny.shape import TinyShape  # noqa: E402
from scripts.tiny.synthetic import RowMaker  # noqa: E402
from scripts.tiny.tokenizer import (  # noqa: E402
    encode_files,
    load_or_train_tokenizer,
    save_tokenizer,
)
from scripts.tiny.trainer import Trainer  # noqa: E402
from scripts.tiny.words import vocabulary_text  # noqa: E402

MODEL = ROOT / "glm_jax" / "data" / "glm-5.3-mini"
TOKENIZER = "tokenizer.json"
LONGEST_KEPT = 1024  # rows up to which freed memory is kept
PLAIN = "TRAIN_TINY_PLAIN_MALLOC"
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}


def main() -> None:
    """Read the command line and do one of the three jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of the training state")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--minutes", type=float, default=106.0, help="budget, resumes included")
    job = parser.add_mutually_exclusive_group()
    job.add_argument("--export", action="store_true", help="write the model and stop")
    job.add_argument("--evaluate", action="store_true", help="measure the model and stop")
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(options.run / "compiled"))
    if options.export:
        export(options.run, options.model)
    elif options.evaluate:
        evaluate_model(options.model, options.run, read_corpus(), reporter(options.run))
    else:
        train(options.run, options.minutes)


def train(run: Path, minutes: float) -> None:
    """Train in `run` until `minutes` of it are used, counting what earlier sessions used."""
    kept = all(os.environ.get(name) == value for name, value in MALLOC.items())
    if not kept and PLAIN not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    corpus, shape = read_corpus(), TinyShape()
    texts = (*corpus.train, vocabulary_text())
    tokenizer = load_or_train_tokenizer(run / TOKENIZER, texts, shape.vocab_size)
    files = encode_files(tokenizer, corpus.train)
    maker = RowMaker(tokenizer, np.concatenate(files))
    trainer = Trainer(run, shape, files, maker, Budget(seconds=minutes * 60))
    report = reporter(run)
    report(f"{len(files)} files, {sum(map(len, files))} tokens, {corpus.files_hash=}")
    keeps_memory = PLAIN not in os.environ
    if not trainer.train(report, LONGEST_KEPT if keeps_memory else None):
        plain = {name: value for name, value in os.environ.items() if name not in MALLOC}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**plain, PLAIN: "1"})
    report("done")


def export(run: Path, model: Path) -> None:
    """Write the Hugging Face checkpoint of the last saved state."""
    shape, state, progress = load_checkpoint(run / CHECKPOINT)
    model.mkdir(parents=True, exist_ok=True)
    export_model(model, shape, state)
    tokenizer = Tokenizer.from_file(str(run / TOKENIZER))
    save_tokenizer(tokenizer, model, shape.max_position_embeddings)
    print(f"step {progress.step}, {progress.tokens} tokens: {model}")


def reporter(run: Path) -> Callable[[str], None]:
    """Return a function that prints a line and adds it to the log in `run`."""

    def report(line: str) -> None:
        text = f"{time.strftime('%H:%M:%S')} {line}"
        print(text, flush=True)
        with (run / "train.log").open("a", encoding="utf-8") as log:
            log.write(text + "\n")

    return report


if __name__ == "__main__":
    main()
