"""Made-up rows that teach recall over long distances; every row is of an exact length.

A row is made of pieces. Real code fills the gaps between facts, so that these rows also train the
language; what cannot be predicted (random values at their first appearance) has weight 0 and what
can only be recalled has weight RECALL.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer

from scripts.tiny.tokenizer import PAD_ID
from scripts.tiny.words import REPLIES, random_name, random_value, random_words

RECALL = 1.5
PLAIN = 1.0
HIDDEN = 0.0
# Of repeated tokens, facts, dictionary, copied lines, chat. The first is the densest lesson: with
# 0.3 of it, and of every token alike, no copying was learnt in 1.7 million tokens.
TASK_SHARES = (0.5, 0.25, 0.1, 0.08, 0.07)


class Row(NamedTuple):
    """One training row: tokens, and the weight of predicting each of them."""

    tokens: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]


class Fact(NamedTuple):
    """Something stated once and asked for later, as (text, weight) pieces."""

    statement: tuple[tuple[str, float], ...]
    recall: tuple[tuple[str, float], ...]


class RowMaker:
    """Makes synthetic rows from a tokenizer and a stream of real code."""

    def __init__(self, tokenizer: Tokenizer, code: Int[np.ndarray, " n"]) -> None:
        """Find the line ends of `code`, so that filler is cut between lines."""
        self.tokenizer = tokenizer
        self.code = code
        newline = [
            "\n" in tokenizer.decode([token], skip_special_tokens=False)
            for token in range(tokenizer.get_vocab_size())
        ]
        self.line_ends = np.flatnonzero(np.array(newline)[code]) + 1

    def make(self, rng: np.random.Generator, length: int) -> Row:
        """Draw a task and return a row of exactly `length` tokens."""
        tasks: tuple[Callable[[np.random.Generator, int], Row], ...] = (
            self.repeated_tokens,
            self.scattered_facts,
            self.dictionary,
            self.copied_lines,
            self.chat,
        )
        task = tasks[rng.choice(len(tasks), p=TASK_SHARES)]
        return self.fit(rng, task(rng, length), length)

    def fit(self, rng: np.random.Generator, row: Row, length: int) -> Row:
        """Cut the row, or fill it with code, to `length`."""
        missing = length - len(row.tokens)
        if missing > 0:
            row = join([row, self.filler(rng, missing)])
        return Row(row.tokens[:length], row.weights[:length])

    def filler(self, rng: np.random.Generator, length: int) -> Row:
        """Return `length` tokens of real code that begin at a line (some after a line's end)."""
        last = len(self.code) - length
        start = int(self.line_ends[rng.integers(len(self.line_ends))])
        start = min(start, last)
        return Row(self.code[start : start + length], np.full(length, PLAIN, np.float32))

    def pieces(self, *parts: tuple[str, float]) -> Row:
        """Encode (text, weight) parts one by one."""
        rows = []
        for text, weight in parts:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            rows.append(Row(np.array(ids, np.int32), np.full(len(ids), weight, np.float32)))
        return join(rows)

    def repeated_tokens(self, rng: np.random.Generator, length: int) -> Row:
        """A list of random tokens or names, again and again: the densest lesson in copying."""
        # Log-uniform: short lists come around often, and are the easier lesson.
        size = int(np.exp(rng.uniform(np.log(4), np.log(max(8, length * 0.45)))))
        if rng.random() < 0.5:
            # As frequent as in code: rare tokens cannot be copied before their row of the head is
            # learnt, which hides the lesson.
            block = self.code[rng.integers(len(self.code), size=size)]
        else:
            names = " ".join(random_name(rng) for _ in range(1 + size // 4))
            block = np.array(self.tokenizer.encode(names, add_special_tokens=False).ids, np.int32)
            block = block[:size]
        parts, total = [Row(block, np.full(len(block), HIDDEN, np.float32))], len(block)
        while total < length and len(parts) < 40:
            if rng.random() < 0.15:
                parts.append(self.filler(rng, int(rng.integers(4, 4 + length // 4))))
            weights = np.full(len(block), RECALL, np.float32)
            weights[0] = HIDDEN  # nothing says that the list starts over
            parts.append(Row(block, weights))
            total = sum(len(part.tokens) for part in parts)
        return join(parts)

    def scattered_facts(self, rng: np.random.Generator, length: int) -> Row:
        """Facts dropped in code, each asked for (once or twice) anywhere behind it."""
        count = int(np.clip(rng.poisson(length / 70), 1, 24))
        form = int(rng.integers(3))
        names: dict[str, None] = {}
        while len(names) < count:
            names[random_name(rng) if form == 1 else random_words(rng, 1)] = None
        events: list[tuple[float, Row]] = []
        for name in names:
            fact = make_fact(rng, name, form)
            told = rng.uniform(0, 0.8)
            events.append((told, self.pieces(*fact.statement)))
            for _ in range(int(rng.integers(1, 3))):
                events.append((rng.uniform(told, 1), self.pieces(*fact.recall)))
        return self.spread(rng, events, length)

    def spread(self, rng: np.random.Generator, events: list[tuple[float, Row]], length: int) -> Row:
        """Put events at their times (0..1), filler between them, about `length` tokens in all."""
        events.sort(key=lambda event: event[0])
        room = max(0, length - sum(len(row.tokens) for _, row in events))
        parts, before = [], 0.0
        for time, row in events:
            gap = int(room * (time - before))
            if gap > 0:
                parts.append(self.filler(rng, gap))
            parts.append(row)
            before = time
        return join(parts)

    def dictionary(self, rng: np.random.Generator, length: int) -> Row:
        """A small JSON object, then look-ups of its keys."""
        count = int(np.clip(length // 40, 3, 16))
        keys = list(dict.fromkeys(random_words(rng, 1) for _ in range(count)))
        values = {key: random_value(rng) for key in keys}
        name = random_name(rng)
        parts = [(f"{name} = {{\n", PLAIN)]
        for key, value in values.items():
            parts += [(f'    "{key}"', HIDDEN), (": ", PLAIN), (value, HIDDEN), (",\n", PLAIN)]
        parts.append(("}\n", PLAIN))
        rows = [self.pieces(*parts)]
        for index in rng.integers(len(keys), size=count * 2):
            if rng.random() < 0.25:
                rows.append(self.filler(rng, int(rng.integers(4, 4 + length // 8))))
            key = keys[index]
            rows.append(
                self.pieces(
                    (f'\n{name}["', PLAIN), (key, HIDDEN), ('"] == ', PLAIN), (values[key], RECALL)
                )
            )
        return join(rows)

    def copied_lines(self, rng: np.random.Generator, length: int) -> Row:
        """A piece of code, other code, and the same piece again."""
        size = int(rng.integers(12, max(16, length // 3)))
        original = self.filler(rng, size)
        between = self.filler(rng, int(rng.integers(0, max(1, length - 2 * size - 16))))
        weights = np.full(size, RECALL, np.float32)
        weights[:2] = HIDDEN
        again = Row(original.tokens, weights)
        return join([original, between, self.pieces(("\n# again:\n", PLAIN)), again])

    def chat(self, rng: np.random.Generator, length: int) -> Row:
        """Short turns in the chat template: small talk, repeating, and recall."""
        rows, total = [Row(np.array([PAD_ID], np.int32), np.zeros(1, np.float32))], 1
        told: dict[str, Fact] = {}
        while total < length:
            draw = rng.random()
            if draw < 0.3:
                question, answer = REPLIES[rng.integers(len(REPLIES))]
                row = self.turns((question, PLAIN), (answer, PLAIN))
            elif draw < 0.5:
                text = random_words(rng, int(rng.integers(1, 6)))
                row = self.turns((" " + text, HIDDEN), (" " + text, RECALL), order="Repeat:")
            elif draw < 0.75 or not told:
                name = random_words(rng, 1)
                told.setdefault(name, make_fact(rng, name, 2))
                row = self.pieces(*told[name].statement)
            else:
                facts = list(told.values())
                row = self.pieces(*facts[rng.integers(len(facts))].recall)
            rows.append(row)
            total += len(row.tokens)
        return join(rows)

    def turns(self, question: tuple[str, float], answer: tuple[str, float], order: str = "") -> Row:
        """One question, `order` in front of it, and its answer."""
        return self.pieces(
            ("<|user|>" + order, PLAIN),
            question,
            ("<|end|>\n<|assistant|>", PLAIN),
            answer,
            ("<|end|>\n", PLAIN),
        )


def make_fact(rng: np.random.Generator, name: str, form: int) -> Fact:
    """Write a fact about `name` as a comment (0), an assignment (1) or chat turns (2)."""
    value = random_value(rng)
    if form == 0:
        return Fact(
            (
                ("\n# code", PLAIN),
                (f" {name}", HIDDEN),
                (f" {value}", HIDDEN),
                ("\n", PLAIN),
            ),
            (
                ("\n# code", PLAIN),
                (f" {name}", HIDDEN),
                (f" {value}", RECALL),
                ("\n", PLAIN),
            ),
        )
    if form == 1:
        return Fact(
            ((f"\n{name} =", HIDDEN), (f" {value}", HIDDEN), ("\n", PLAIN)),
            ((f"\nassert {name} ==", HIDDEN), (f" {value}", RECALL), ("\n", PLAIN)),
        )
    return Fact(
        (
            ("<|user|>The code of", PLAIN),
            (f" {name}", HIDDEN),
            (" is", PLAIN),
            (f" {value}", HIDDEN),
            (".<|end|>\n<|assistant|>Noted.<|end|>\n", PLAIN),
        ),
        (
            ("<|user|>What is the code of", PLAIN),
            (f" {name}", HIDDEN),
            ("?<|end|>\n<|assistant|>The code of", PLAIN),
            (f" {name}", RECALL),
            (" is", PLAIN),
            (f" {value}", RECALL),
            (".<|end|>\n", PLAIN),
        ),
    )


def join(rows: list[Row]) -> Row:
    """Put rows behind each other."""
    return Row(
        np.concatenate([row.tokens for row in rows]), np.concatenate([row.weights for row in rows])
    )
