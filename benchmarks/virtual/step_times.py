"""Step times that several benchmarks use, as verifiable numbers."""

from quire.tools.step_times import Attention, Roofline

# Llama-3.1-8B in 16 bits on an H200: 16 GB at 4.3 TB/s, half of 989 TFLOP/s, 131 kB per token.
LLAMA_8B = Roofline(16e9 / 4.3e12, 16e9 / 494e12, (Attention(131_072 / 4.3e12),))

# P's first setting: OPT-13B in 16 bits on an A100. Weights are 26 GB at 1,555 GB/s. A token takes
# 26 GFLOP at half of 312 TFLOP/s, and has 0.82 MB of keys and values. Its blocks of 16 cross PCIe
# at 25 GB/s.
OPT_13B = Roofline(
    26e9 / 1555e9, 26e9 / 156e12, (Attention(0.82e6 / 1555e9),), copy_s=16 * 0.82e6 / 25e9
)
