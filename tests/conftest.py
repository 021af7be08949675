"""One thread per process: the models here are tiny, and threads that wait for each other on a busy
machine make their tests ten times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
