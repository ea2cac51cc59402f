"""Train, export and evaluate the small model that is shipped with glm-jax.

    python scripts/train_tiny.py --run RUN --minutes 90      train, or go on where RUN stands
    python scripts/train_tiny.py --run RUN --export MODEL    write the Hugging Face checkpoint
    python scripts/train_tiny.py --evaluate MODEL            measure it and write its card

On CPU, page faults of large temporaries cost up to nine times the arithmetic. The script therefore
starts itself again with glibc told to keep freed memory (MALLOC_* below).
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from scripts.tiny.corpus import read_corpus  # noqa: E402
from scripts.tiny.phases import Budget  # noqa: E402
from scripts.tiny.shape import TinyShape  # noqa: E402
from scripts.tiny.synthetic import RowMaker  # noqa: E402
from scripts.tiny.tokenizer import encode_files, load_or_train_tokenizer  # noqa: E402
from scripts.tiny.trainer import Trainer  # noqa: E402
from scripts.tiny.words import vocabulary_text  # noqa: E402

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}


def main() -> None:
    """Read the command line and do one of the three jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of the checkpoint, tokenizer and log")
    parser.add_argument("--minutes", type=float, default=90.0, help="whole budget, resumes included")
    options = parser.parse_args()
    train(options.run, options.minutes)


def train(run: Path, minutes: float) -> None:
    """Train in `run` until `minutes` of it are used, counting what earlier sessions used."""
    run.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(run / "compiled"))
    corpus, shape = read_corpus(), TinyShape()
    tokenizer = load_or_train_tokenizer(
        run / "tokenizer.json", (*corpus.train, vocabulary_text()), shape.vocab_size
    )
    files = encode_files(tokenizer, corpus.train)
    maker = RowMaker(tokenizer, np.concatenate(files))
    trainer = Trainer(run, shape, files, maker, Budget(seconds=minutes * 60))
    with (run / "train.log").open("a") as log:

        def report(line: str) -> None:
            text = f"{time.strftime('%H:%M:%S')} {line}"
            print(text, flush=True)
            log.write(text + "\n")
            log.flush()

        report(f"{len(files)} files, {sum(map(len, files))} tokens, {corpus.files_hash=}")
        trainer.train(report)
        report("done")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    main()
