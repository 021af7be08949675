"""What holds for all tests: one thread per process, and signals that do what they do in a terminal.

The models here are tiny, and threads that wait for each other on a busy machine make their tests
ten times slower. A test run that is started in the background (`&`, nohup) ignores SIGINT or
SIGHUP, and so would all processes that it starts.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)
