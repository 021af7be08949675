"""Triton kernels, one file for each operation or family of operations.

Import this folder only on a GPU, because importing triton takes half a second. The operations in
`quire.ops`, which have torch references, call these kernels on a GPU.

Rules of this folder:
- A kernel computes in float32, whatever it loads. Dots take operands of DOT_DTYPE: their own dtype
  on a GPU, and float32 under Triton's interpreter, whose bfloat16 arithmetic is wrong.
- Sizes that vary per step come from device memory, or the grid covers their maximum. No launch
  waits for the device, so a CUDA graph can capture every launch.
- Offsets of blocks are 64 bits wide.
- `CONFIGS` of a module lists its launches in production. `tests/kernels` compiles them for sm_90
  without a device, and fails on spilled registers and on shared memory above the limit.
"""
