"""How a step is spread over the devices of a node."""

import math
import re
from dataclasses import dataclass

_NAME = re.compile(r"tp(?P<tp>\d+)ep(?P<ep>\d+)dp(?P<dp>\d+)")


@dataclass(frozen=True)
class Layout:
    """A parallel layout, in the words of SGLang's options.

    Attributes:
        tp: devices. MLPs, shared experts and vocabulary are split over all of them.
        ep: devices that the routed experts are spread over, each whole: all, or 1, where every
            expert's width is split over all devices.
        dp: attention ranks, each with its own requests; heads are split over the tp / dp devices
            of a rank.
        split_chunks: the rows of a chunk are spread over all ranks, with a gather of the keys they
            attend to; otherwise a chunk lives on one rank.
        exchange: how rows reach the experts. "all_to_all" sends a row once to every other device
            that holds an expert of its choice; "gather" sends all rows to all devices and sums.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    split_chunks: bool = True
    exchange: str = "all_to_all"

    def __post_init__(self) -> None:
        """Refuse what is not a layout.

        Raises:
            ValueError: it names the option, its value and what is allowed.
        """
        if self.tp < 1 or self.ep not in (1, self.tp):
            raise ValueError(
                f"ep is {self.ep} of {self.tp} devices; allowed: 1 (every expert split over all) "
                "or tp (whole experts spread over all)."
            )
        if self.dp < 1 or self.tp % self.dp:
            raise ValueError(f"dp is {self.dp}, which does not divide tp {self.tp}.")
        if self.exchange not in ("all_to_all", "gather"):
            raise ValueError(f"exchange is {self.exchange!r}; allowed: all_to_all, gather.")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read a name like ``tp8ep8dp8``, or ``one``.

        Raises:
            ValueError: it is neither, or no layout.
        """
        if text == "one":
            return cls()
        found = _NAME.fullmatch(text)
        if found is None:
            raise ValueError(f"layout is {text!r}; allowed: one, or a name like tp8ep8dp8.")
        return cls(int(found["tp"]), int(found["ep"]), int(found["dp"]))

    def __str__(self) -> str:
        """The name that ``parse`` reads."""
        return "one" if self.tp == 1 else f"tp{self.tp}ep{self.ep}dp{self.dp}"

    @property
    def attention_tp(self) -> int:
        """Devices that share the heads of one attention rank."""
        return self.tp // self.dp

    @property
    def sends_copies(self) -> bool:
        """Whether rows travel to single devices, not to all."""
        return self.exchange == "all_to_all" and self.ep > 1

    def devices_of_row(self, experts: int, picks: int) -> float:
        """Expected devices that hold at least one expert of a row's choice.

        ep (1 - C(E - E/ep, X) / C(E, X)): a row's experts are distinct, each choice as likely as
        another. 5.29 of 8 for 8 of 256 experts.
        """
        others = experts - experts // self.ep
        return self.ep * (1 - math.comb(others, picks) / math.comb(experts, picks))


def distinct_experts(experts: int, picks: int, rows: float | int) -> float:
    """Expected experts that at least one of ``rows`` rows chooses: E (1 - (1 - X/E)^rows)."""
    return experts * (1 - (1 - picks / experts) ** rows)
