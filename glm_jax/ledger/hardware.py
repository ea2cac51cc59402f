"""What one device can do, as data with sources.

Two sets of rates for each: "specified" is the data sheet's, "attainable" what a long product or
copy reaches. The attainable rates of the H200 are those of ``glm_jax.simulate.step_time``; those of
other devices are the same fractions of their data sheets, an assumption.
"""

from collections.abc import Mapping
from typing import NamedTuple

from glm_jax.simulate.step_time import Hardware as StepHardware

RATES = ("attainable", "specified")


class Hardware(NamedTuple):
    """One device.

    Attributes:
        name: of the device and of the set of rates.
        memory: bytes per second from memory.
        cache: bytes per second from the last cache on the chip.
        cache_bytes: of that cache.
        fp8: operations per second of products in e4m3.
        bf16: in bfloat16.
        float32: in float32, without tensor cores.
        link: bytes per second to the other devices, in one direction.
        collective: seconds of one small exchange between devices.
        capacity: bytes of memory.
        sources: where the figures are from, by field.
    """

    name: str
    memory: float
    cache: float
    cache_bytes: float
    fp8: float
    bf16: float
    float32: float
    link: float
    collective: float
    capacity: float
    sources: Mapping[str, str]

    def rate(self, precision: str) -> float:
        """Operations per second in "fp8", "bf16" or "float32"."""
        return {"fp8": self.fp8, "bf16": self.bf16, "float32": self.float32}[precision]


_NODE = StepHardware()
_DERATED = "the H200's fraction of its data sheet; an assumption"
_HOPPER = "NVIDIA H100 data sheet, SXM, halved where it counts sparsity"

_H200_SPECIFIED = Hardware(
    name="h200 specified",
    memory=4.8e12,
    cache=_NODE.cache,
    cache_bytes=50e6,
    fp8=1979e12,
    bf16=990e12,
    float32=67e12,
    link=450e9,
    collective=4e-6,
    capacity=141e9,
    sources={
        "memory": "NVIDIA H200 data sheet",
        "cache": "assumed",
        "cache_bytes": "NVIDIA H100 data sheet; the same chip",
        "fp8": "NVIDIA H200 data sheet, halved: it counts sparsity",
        "bf16": "NVIDIA H200 data sheet, halved: it counts sparsity",
        "float32": "NVIDIA H200 data sheet",
        "link": "NVIDIA H200 data sheet: NVLink 900 GB/s for both directions",
        "collective": "assumed",
        "capacity": "NVIDIA H200 data sheet",
    },
)
_H200 = _H200_SPECIFIED._replace(
    name="h200 attainable",
    memory=_NODE.memory,
    fp8=_NODE.fp8,
    bf16=_NODE.bf16,
    float32=67e12 * _NODE.bf16 / 990e12,
    link=_NODE.link,
    collective=_NODE.collective,
    sources={
        **_H200_SPECIFIED.sources,
        "memory": "a measured copy",
        "fp8": "80 % of 1979e12, as for bf16; near the 1550e12 that DeepGEMM publishes for H800",
        "bf16": "a measured matrix product",
        "float32": "80 % of the data sheet, as for bf16; an assumption",
        "link": "89 % of the data sheet; an assumption",
    },
)
_H100_SPECIFIED = _H200_SPECIFIED._replace(
    name="h100 specified",
    memory=3.35e12,
    capacity=80e9,
    sources={
        **dict.fromkeys(("memory", "cache_bytes", "fp8", "bf16", "float32", "capacity"), _HOPPER),
        "link": "NVIDIA H100 data sheet: NVLink 900 GB/s for both directions",
        "cache": "assumed, as H200",
        "collective": "assumed, as H200",
    },
)
_B200_SPECIFIED = Hardware(
    name="b200 specified",
    memory=8.0e12,
    cache=_NODE.cache * 8.0 / 4.8,
    cache_bytes=126e6,
    fp8=4500e12,
    bf16=2250e12,
    float32=80e12,
    link=900e9,
    collective=4e-6,
    capacity=180e9,
    sources={
        **dict.fromkeys(
            ("memory", "fp8", "bf16", "float32"),
            "NVIDIA Blackwell architecture brief, HGX B200 at 1000 W, without sparsity",
        ),
        "cache": "assumed: the H200's, in proportion to memory",
        "cache_bytes": "published measurements of B200; not in the data sheet",
        "link": "NVIDIA HGX B200 data sheet: NVLink 5, 1800 GB/s for both directions",
        "collective": "assumed, as H200",
        "capacity": "NVIDIA HGX B200 data sheet: 1.44 TB for eight",
    },
)


def _attainable(specified: Hardware, name: str) -> Hardware:
    """The H200's fractions of another data sheet."""
    fields = ("memory", "fp8", "bf16", "float32", "link", "collective")
    rates = {
        field: getattr(specified, field) * getattr(_H200, field) / getattr(_H200_SPECIFIED, field)
        for field in fields
    }
    sources = {**specified.sources, **dict.fromkeys(fields, _DERATED)}
    return specified._replace(name=f"{name} attainable", sources=sources, **rates)


HARDWARE: Mapping[str, Mapping[str, Hardware]] = {
    "h200": {"attainable": _H200, "specified": _H200_SPECIFIED},
    "h100": {"attainable": _attainable(_H100_SPECIFIED, "h100"), "specified": _H100_SPECIFIED},
    "b200": {"attainable": _attainable(_B200_SPECIFIED, "b200"), "specified": _B200_SPECIFIED},
}
