"""Triton kernels, one file for each operation or family of operations.

Nothing here is imported where no GPU is used: importing triton takes half a second. The operations
themselves, with their torch references, are in `quire.ops`; these are what they call on a GPU.

Rules of this room:
- A kernel computes in float32, whatever it loads; dots take operands of DOT_DTYPE, which is their
  own dtype on a GPU and float32 under Triton's interpreter, whose bfloat16 arithmetic is wrong.
- Sizes that vary from step to step come from device memory or from a grid that covers the most;
  nothing waits for the device, so that every launch can be captured in a CUDA graph.
- Offsets of blocks are 64 bits wide.
- `CONFIGS` of a module lists what production launches: `tests/kernels` compiles all of it for sm_90
  without a device, and fails on spilled registers and on shared memory above the limit.
"""
