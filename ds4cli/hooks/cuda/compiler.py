"""Compiles this package's kernels.

`mx.fast.cuda_kernel` puts MLX's own headers in front of each source, which then takes two seconds a
kernel in every process; ours need no header and take a twentieth of that. The compiler is the
one that MLX's CUDA backend has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx

from ds4cli.errors import ModelError

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
TYPES = {mx.float32: "float", mx.bfloat16: "bf16", mx.float16: "f16"}

# Numbers of all types as float and back, rounded to the nearest even.
_PRELUDE = """
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
__device__ float number(float x) { return x; }
__device__ float number(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ float number(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ void put(float& to, float x) { to = x; }
__device__ void put(bf16& to, float x) {
  const unsigned bits = __float_as_uint(x);
  to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
__device__ void put(f16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
"""


def kernel(
    name: str, inputs: Sequence[str], outputs: Sequence[str], scalars: Sequence[str], body: str
) -> bytes:
    """One kernel for this card. inputs, outputs: "type name"; scalars: ints that follow them."""
    arguments = [f"const {x.replace(' ', '* __restrict__ ')}" for x in inputs]
    arguments += [x.replace(" ", "* __restrict__ ") for x in outputs]
    arguments += [f"int {x}" for x in scalars]
    head = f'extern "C" __global__ void {name}({", ".join(arguments)})'
    return compiled(f"{_PRELUDE}{head} {{{body}}}\n", name, _architecture())


def _architecture() -> str:
    """Machine code, not PTX, which an older driver might not read."""
    info = mx.device_info(mx.gpu)
    return f"sm_{info['compute_capability_major']}{info['compute_capability_minor']}"


def compiled(source: str, name: str, architecture: str) -> bytes:
    """`source` as machine code. ModelError, with what the compiler says."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    at = ctypes.byref(program)
    _check(nvrtc.nvrtcCreateProgram(at, source.encode(), f"{name}.cu".encode(), 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options) != 0:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise ModelError(f"the kernel `{name}` cannot be compiled: {log.decode().strip()}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(at)


def _text(size_of: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(get(program, text))
    return text.raw


def _check(result: int) -> None:
    if result != 0:
        raise ModelError(f"NVIDIA's run-time compiler failed with code `{result}`")


@cache
def _nvrtc() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ModelError(
        "NVIDIA's run-time compiler is not loaded", "set `DS4CLI_CUDA_FORMS=none` to go without"
    )
