"""bfloat16 for Numba kernels: a bf16 array is passed as its uint16 bits, and these two convert.

Numba has no bfloat16. The one thing to know: both are single expressions that LLVM turns into vector
instructions inside a plain loop, so a kernel can call them for each element.

    bf16_to_f32(bits: uint16) -> float32   exact: a bf16 is the upper half of a float32
    f32_to_bf16(x: float32) -> uint16      round to nearest, ties to even, as torch's conversion does;
                                           any NaN becomes the quiet NaN 0x7FC0

From torch: `tensor.view(torch.int16).numpy().view(numpy.uint16)` shares the memory of a bf16 tensor.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_QUIET_NAN = 0x7FC0


@intrinsic
def bf16_to_f32(_context: Any, bits: Any) -> Any:
    """uint16 bits of a bfloat16 -> the same number as a float32."""
    if bits not in (types.uint16, types.int16):
        raise TypingError(f"bf16_to_f32 takes the uint16 bits of a bfloat16, not {bits}")

    def codegen(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(bits), codegen


@intrinsic
def f32_to_bf16(_context: Any, x: Any) -> Any:
    """float32 -> uint16 bits of the nearest bfloat16, ties to even."""
    if x != types.float32:
        raise TypingError(
            f"f32_to_bf16 takes a float32, not {x}: cast first, a hidden double costs a rounding"
        )

    def codegen(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _I32)
        # Adding 0x7FFF plus the last kept bit carries into the kept half exactly when rounding goes up.
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.lshr(
            builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF))), ir.Constant(_I32, 16)
        )
        # Tested on the bits, so that a kernel compiled with fastmath cannot assume NaN away.
        magnitude = builder.and_(bits, ir.Constant(_I32, 0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", magnitude, ir.Constant(_I32, 0x7F800000))
        return builder.trunc(builder.select(is_nan, ir.Constant(_I32, _QUIET_NAN), rounded), _I16)

    return types.uint16(x), codegen
