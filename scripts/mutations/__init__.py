"""Broken variants of the product, one for each bug of the catalogue; `scripts.mutate` runs them."""

from scripts.mutations.d1 import SHAPES
from scripts.mutations.d2 import PADS
from scripts.mutations.d3 import STARVATION
from scripts.mutations.d6 import PAGES
from scripts.mutations.d7 import SPECULATION
from scripts.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (*SHAPES, *PADS, *STARVATION, *PAGES, *SPECULATION)
