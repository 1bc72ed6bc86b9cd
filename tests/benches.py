"""What the tests of bench share."""

import time

from tridecode import cli as commands

FACTS = {"dtype": "bfloat16", "gpu": "a clock", "tridecode": "0", "torch": "0", "triton": "0"}


class Clock:
    """torch.cuda.Event on a machine without one."""

    def __init__(self, enable_timing):
        self.time = None

    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        assert self.time is not None

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)


def run_bench(capsys, *argv):
    """Run `bench ARGS`; returns exit code, stdout and stderr."""
    code = commands.main(["bench", *argv])
    return code, *capsys.readouterr()
