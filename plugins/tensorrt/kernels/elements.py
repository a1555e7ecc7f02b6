"""Elements of the KV pool: rounding to the pool's type, and back.

e4m3 is a hardware type from compute capability 8.9 on. Below, integers decode it: the bits of e4m3 moved to the place
of fp16's are the value divided by 256, subnormals too. Encoding is by integers everywhere: a step encodes few elements,
and Triton's interpreter, in which the kernels are proved, rounds this type wrongly where a mantissa carries.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""The pool's pointer has the element's type: fp16 or bf16."""
E4M3 = tl.constexpr(1)
"""Bytes of e4m3; the hardware converts."""
E4M3_INTEGER = tl.constexpr(2)
"""Bytes of e4m3; integers convert."""

E4M3_MAX = tl.constexpr(448.0)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def decode_e4m3(code):
    """float32 of e4m3 bytes."""
    bits = code.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def encode_e4m3(x):
    """e4m3 bytes of float32: to nearest, ties to even, saturating."""
    size = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = size.to(tl.int32, bitcast=True)
    exponent_and_mantissa = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = exponent_and_mantissa - (120 << 3)  # the exponent's bias from 127 to 7
    # Below 2^-6, multiples of 2^-9: adding 2^23 leaves the rounded multiple in the low bits.
    subnormal = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 0.015625, subnormal, normal)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_pool(x, kind: tl.constexpr, element: tl.constexpr):
    """What the pool keeps of float32 *x*."""
    if kind != PLAIN:
        return encode_e4m3(x)
    elif element == tl.float16:
        return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16)
    else:
        return x.to(element)


@triton.jit
def from_pool(stored, kind: tl.constexpr, compute: tl.constexpr):
    """What was loaded from the pool, in the type that is computed with. e4m3 is exact in fp16 and in bf16."""
    if kind == E4M3:
        return stored.to(tl.float8e4nv, bitcast=True).to(compute)
    elif kind == E4M3_INTEGER:
        return decode_e4m3(stored).to(compute)
    else:
        return stored.to(compute)
