"""Operations and kernels of CPUs, each beside its limit."""
