"""Random lives of an engine with everything that a request may ask for.

`python -m scripts.fuzz_engine --steps 100000 --seed 0` serves random requests on the small golden
model with every feature of `engine_fuzz.wish.FEATURES`, prompts that begin alike, tiny pools,
aborts at every moment, faults in every phase, all execution modes, and drafts that are the model's,
right or wrong. In every step the invariants of `engine_fuzz.invariants` must hold; in the end each
request must have what it gets alone: tokens (but for close decisions, DESIGN 10.4, of at most 1 %),
text, reasons, log-probabilities; all pages and slots must be back and nothing compiled late.

What fails is made smaller and written to a file; `--replay FILE` lives it again.
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import jax

from glm_jax import LLM, SamplingParams
from scripts.decision_margins import decisions
from scripts.engine_fuzz.invariants import check
from scripts.engine_fuzz.judge import Judge
from scripts.engine_fuzz.letters import letters
from scripts.engine_fuzz.life import Life, draw_life
from scripts.engine_fuzz.run import Living
from scripts.engine_fuzz.shrink import shrink
from scripts.engine_fuzz.wish import Known, Wish, add_features, draw_basic
from scripts.fuzz_drafts import COMPILED
from scripts.fuzz_modes import target_of
from scripts.fuzz_schedules import MODEL, OPTIONS, Target

# Wishes that some lives draw from; each is also granted alone.
BLOCK_WISHES = 40
BLOCK_LIVES = 60
MODES = (("full", 0.6), ("loop", 0.2), ("piecewise", 0.2))
# EAGER takes a second or more per step.
WITH_EAGER = (*MODES, ("eager", 0.0005))
MOST_CLOSE = 0.01


class EngineFuzz:
    """Lives on one model.

    Attributes:
        llm: The model.
        mode: Of the life that is lived.
        seen: What was reached so far.
        judge: Compares with requests alone.
    """

    def __init__(self, llm: LLM, modes: Sequence[tuple[str, float]] = (("full", 1.0),)) -> None:
        """Compile what the modes need.

        Args:
            llm: The model.
            modes: Execution modes, "loop" too, and how often each.
        """
        self.seen: Counter[str] = Counter()
        self.llm = llm
        self.mode = "full"
        self._modes = modes
        self._targets: dict[str, Target] = {
            mode: llm if mode == "full" else target_of(llm, mode) for mode, _ in modes
        }
        vocab = llm.model_config.vocab_size
        self._think = vocab - 2
        self._tokenizer = letters(vocab)
        self.judge = Judge(llm, self._tokenizer, (self._think, self._think + 1))
        self._block_number = -1
        self._block: list[Wish] = []

    def life(self, seed: int, number: int) -> Life:
        """Draw a life; the same numbers give the same one."""
        block = number // BLOCK_LIVES
        if block != self._block_number:
            self.judge.forget()
            self._block = self._draw_block(Random(f"wishes {seed} {block}"))
            self._block_number = block
        return draw_life(Random(f"life {seed} {number}"), self.llm, self._block, self._modes)

    def _draw_block(self, rng: Random) -> list[Wish]:
        page = self.llm.config.page_size
        stems = [
            rng.choices(range(self._think), k=rng.randint(2 * page, 9 * page)) for _ in range(3)
        ]
        wishes: list[Wish] = []
        while len(wishes) < BLOCK_WISHES:
            basic = draw_basic(rng, stems, self._think, page=page)
            alone = self.judge.alone(basic).completion
            known = Known(
                self._think + 2,
                (self._think, self._think + 1),
                basic.prompt,
                alone.token_ids,
                alone.text,
                basic.params["max_tokens"],
            )
            wish = add_features(rng, basic, known)
            try:
                self.judge.alone(wish.with_params(seed=wish.params.get("seed") or 0))
            except ValueError:
                # What it asks for leaves no token to draw, or bans too many.
                self.seen["wishes refused"] += 1
                continue
            wishes.append(wish)
            if rng.random() < 0.15:
                # Somebody goes on from there.
                prompt = [*wish.prompt, *alone.token_ids, *rng.choices(range(self._think), k=2)]
                wishes.append(replace(wish, prompt=prompt[: 8 * page]))
        return wishes

    def live(self, life: Life) -> None:
        """Live a life and judge what its guests got.

        Raises:
            AssertionError: Something does not hold.
        """
        target = self._targets[life.mode]
        self.mode = life.mode
        expected: dict[str, Sequence[int]] = {}
        if life.drafter != "own":
            expected = self._expected(life)
        living = Living(target, life, self._tokenizer, expected)
        living.live()
        for ended in living.ended:
            wish = life.guests[ended.number].wish
            self.judge.compare(wish, ended.output, ended.logits, ended.seeds)
        self.seen.update(living.seen)
        self.seen["lives"] += 1

    def _expected(self, life: Life) -> dict[str, Sequence[int]]:
        """Return the tokens of every completion, by the id of the request that serves it."""
        expected: dict[str, Sequence[int]] = {}
        for number, guest in enumerate(life.guests):
            count, seed = guest.wish.params.get("n", 1), guest.wish.params["seed"]
            for index in range(count):
                name = f"r{number}" if count == 1 else f"{index}_r{number}"
                own = guest.wish.with_params(seed=(seed + index) % 2**64)
                expected[name] = self.judge.alone(own).completion.token_ids
        return expected

    def fails(self, life: Life) -> bool:
        """Live a life; whether something does not hold."""
        try:
            self.live(life)
        except Exception:  # whatever it is, it is not to happen
            return True
        return False

    def run(self, *, steps: int, seed: int, seconds: float = 60.0) -> Counter[str]:
        """Live until so many steps were taken.

        Args:
            steps: At least so many.
            seed: Another one, other lives.
            seconds: To make what fails smaller.

        Raises:
            AssertionError: Something does not hold; its note holds the life.
        """
        number = 0
        while self.seen["steps"] < steps:
            life = self.life(seed, number)
            try:
                self.live(life)
            except Exception as error:  # whatever broke, its life is made smaller; then it goes on
                least = shrink(life, self.fails, seconds=seconds)
                error.add_note(f"life {number} of seed {seed}: {json.dumps(least.as_json())}")
                raise
            number += 1
            if number % BLOCK_LIVES == 0:
                print(f"{self.seen['steps']} steps", file=sys.stderr, flush=True)
        found = self.seen + self.judge.seen
        completions = found["completions"]
        close = found["close decisions"]
        check(close <= 1 + MOST_CLOSE * completions, f"{close} close decisions of {completions}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other lives")
    parser.add_argument("--no-eager", action="store_true", help="no EAGER steps, which take long")
    parser.add_argument("--replay", type=Path, help="a file that a failure wrote")
    parser.add_argument("--failure", type=Path, default=Path("fuzz_failure.json"))
    options = parser.parse_args()
    fuzz = EngineFuzz(LLM(MODEL, **OPTIONS), MODES if options.no_eager else WITH_EAGER)
    if options.replay is not None:
        fuzz.live(Life.from_json(json.loads(options.replay.read_text())))
        print("it does not fail")
        return
    # Margins of sampled tokens need a program of their own.
    decisions(fuzz.llm, [1], [2], SamplingParams())
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        # Operators of EAGER steps are compiled one by one.
        lambda event, duration_secs, **_: (
            compiled.append(fuzz.mode) if event == COMPILED and fuzz.mode != "eager" else None
        )
    )
    started = time.perf_counter()
    try:
        seen = fuzz.run(steps=options.steps, seed=options.seed)
    except Exception as error:  # whatever broke, it can be lived again; the exit status tells
        notes = getattr(error, "__notes__", [])
        written = notes[-1].split(": ", 1)[1] if notes else ""
        options.failure.write_text(written)
        traceback.print_exc()
        sys.exit(f"failed; `--replay {options.failure}` lives it again")
    check(not compiled, f"programs were compiled late in lives of modes {compiled}")
    minutes = round((time.perf_counter() - started) / 60, 1)
    print(json.dumps({**dict(sorted(seen.items())), "minutes": minutes}, indent=2))
    print(f"largest difference of a log-probability: {fuzz.judge.furthest:.1e}")


if __name__ == "__main__":
    main()
