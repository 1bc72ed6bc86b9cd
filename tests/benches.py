"""What the tests of bench share."""

from tridecode import commands


def run_bench(capsys, *argv):
    """Run `bench ARGS`; returns exit code, stdout and stderr."""
    code = commands.main(["bench", *argv])
    return code, *capsys.readouterr()
