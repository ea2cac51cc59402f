"""A 32-bit number in the registers of one GPU thread, for address arithmetic in inline code."""

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith


def signless(bits: int) -> ir.Type:
    """The integer type of that many bits."""
    return ir.IntegerType.get_signless(bits)


class Word:
    """Unsigned, with Python's operators; a power of two on the right costs one shift or mask."""

    def __init__(self, value: ir.Value | int):
        self.value = arith.constant(signless(32), value) if isinstance(value, int) else value

    @classmethod
    def of_scalar(cls, scalar: mgpu.FragmentedArray) -> "Word":
        """The number that a kernel passed into its inline code."""
        return cls(scalar.registers.item())

    @classmethod
    def thread(cls) -> "Word":
        """The thread's number in its warpgroup, 0 .. 127."""
        return cls(arith.remui(mgpu.utils.thread_idx(), cls(128).value))

    def __add__(self, other: "Word | int") -> "Word":
        return Word(arith.addi(self.value, _value(other)))

    def __mul__(self, other: "Word | int") -> "Word":
        return Word(arith.muli(self.value, _value(other)))

    def __floordiv__(self, other: "Word | int") -> "Word":
        return Word(arith.divui(self.value, _value(other)))

    def __mod__(self, other: "Word | int") -> "Word":
        return Word(arith.remui(self.value, _value(other)))

    def __xor__(self, other: "Word | int") -> "Word":
        return Word(arith.xori(self.value, _value(other)))

    def at_most(self, other: "Word | int") -> "Word":
        """The smaller of the two."""
        return Word(arith.minui(self.value, _value(other)))

    def wide(self) -> ir.Value:
        """The same number in 64 bits."""
        return arith.extui(signless(64), self.value)


def _value(number: Word | int) -> ir.Value:
    return Word(number).value if isinstance(number, int) else number.value
