"""Words, names, values and replies of the synthetic rows; all of our own making."""

import numpy as np

_WORD_LIST = """
apple river stone cloud maple tiger copper silver window garden bridge castle
forest harbor island jungle kettle ladder marble needle orange pepper quartz ribbon saddle
timber valley walnut yellow zebra anchor basket candle desert engine feather goblet hammer
indigo jacket kernel lantern meadow nickel oyster pillow rocket sailor temple violet wagon
amber birch cedar delta ember falcon granite hazel ivory jasper kite lemon mango north olive
pearl quill raven sand tulip umber velvet willow yarn zinc acorn badger cobalt dagger eagle
fern grove heron iris juniper koala lily moss nectar onyx panda quiver rust swan thorn urchin
vine wren yak alpha beta gamma sigma omega lambda kappa theta table paper number letter color
field record buffer signal packet socket thread module object method string vector matrix
"""
_SYLLABLE_LIST = """
ba be bo da de di do fa fi ga go ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po
ra re ri ro sa se si so ta te ti to va ve vi vo za ze zo
"""
WORDS = tuple(_WORD_LIST.split())
SYLLABLES = tuple(_SYLLABLE_LIST.split())
REPLIES = (
    ("Hello", "Hello! How can I help?"),
    ("Hi", "Hello! How can I help?"),
    ("Hello!", "Hello! How can I help?"),
    ("Good morning", "Good morning! How can I help?"),
    ("Who are you?", "I am a very small language model, trained on Python code."),
    ("What are you?", "I am a very small language model, trained on Python code."),
    ("What can you do?", "I can continue Python code, repeat text and recall codes."),
    ("What is your name?", "I have no name. I am a very small language model."),
    ("How are you?", "I am fine, thank you."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("What is Python?", "Python is a programming language."),
    ("Which language do you know?", "Mostly Python, and a little English."),
    ("Are you large?", "No, I have about twelve million parameters."),
    ("Write a function that adds two numbers.", "def add(a, b):\n    return a + b"),
    ("Write a loop over a list.", "for item in items:\n    print(item)"),
    ("How do I open a file?", "with open(path) as file:\n    text = file.read()"),
    ("How do I sort a list?", "items.sort()"),
    ("How do I import json?", "import json"),
)


def random_words(rng: np.random.Generator, count: int) -> str:
    """Return `count` words with blanks between them."""
    return " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=count))


def random_name(rng: np.random.Generator) -> str:
    """Return a made-up identifier."""
    parts = [SYLLABLES[i] for i in rng.integers(len(SYLLABLES), size=rng.integers(2, 5))]
    if rng.random() < 0.3:
        parts.append("_" + random_words(rng, 1))
    return "".join(parts)


def random_value(rng: np.random.Generator) -> str:
    """Return a number of two to five digits, or a made-up string."""
    if rng.random() < 0.7:
        return str(rng.integers(10, 10 ** int(rng.integers(2, 6))))
    return f'"{random_name(rng)}"'


def vocabulary_text() -> str:
    """Return text in which every word is frequent enough to become one token."""
    turns = [f"{question}\n{answer}\n" for question, answer in REPLIES]
    frame = "\n# note: the code of\n# recall: the code of\nThe code of\nWhat is the code of\n"
    return (" " + " ".join(WORDS) + "\n" + "".join(turns) + frame + "Noted.\nRepeat:\n") * 300
