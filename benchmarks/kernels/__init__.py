"""Operations and kernels of CPUs, each next to its limit."""
