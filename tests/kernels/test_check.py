"""check_op accepts a correct op and rejects an op that breaks any single rule. The ops are torch functions."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from check import check_op
from util import CUDA, DEVICE, meta_rows, poisoned, random

from tridecode import layout
from tridecode.kernels.op import Op

ROWS, N = 3, 10


class Norm(NamedTuple):
    weight: torch.Tensor
    normed: torch.Tensor | None


@dataclass(frozen=True)
class Buffers:
    sums: torch.Tensor
    room: torch.Tensor


def running(meta):
    return (meta[:, layout.STATUS] == layout.RUN).nonzero().flatten().tolist()


def add_ref(meta, x, hidden, norm, buffers, arrived):
    """Compute hidden += x, normed = hidden * weight, and partial sums of squares of `hidden` as an op leaves them."""
    for row in running(meta):
        hidden[row] += x[row]
        buffers.sums[row] = 0
        buffers.sums[row, 0] = hidden[row].square().sum()
        if norm.normed is not None:
            norm.normed[row] = hidden[row] * norm.weight


def add(meta, x, hidden, norm, buffers, arrived, *, parts=2):
    add_ref(meta, x, hidden, norm, buffers, arrived)
    for row in running(meta):
        buffers.sums[row, 1:parts] = 1
        buffers.sums[row, 0] -= parts - 1
        buffers.room[row] = torch.rand(1)


def add_bytes(meta, x, hidden, norm, buffers, arrived) -> int:
    return x.nbytes + 2 * hidden.nbytes


def op_of(launch, **changes) -> Op:
    forms = dict(ref=add_ref, bytes=add_bytes, outputs=("hidden", "norm.normed", "buffers.sums")) | changes
    return Op(launch, **forms)


def arguments(normed: bool = True, status: int = layout.RUN) -> dict:
    pool = poisoned(2, ROWS, 2 * N)  # normed and the scratch lie between other memory
    return dict(
        meta=meta_rows(*range(ROWS), status=status),
        x=random(ROWS, N),
        hidden=random(ROWS, N, seed=1),
        norm=Norm(random(N), pool[0, :, 3 : 3 + N] if normed else None),
        buffers=Buffers(poisoned(ROWS, 4), pool[1, :, :1]),
        arrived=torch.zeros(ROWS, dtype=torch.int32, device=DEVICE),
    )


def check(op: Op, args=None, **changes):
    parameters = dict(
        tolerance={"hidden": 1e-6, "norm.normed": 1e-6, "buffers.sums": 1e-5},
        accumulates=("hidden",),
        scratch=("buffers.room",),
        views={"buffers.sums": lambda sums: sums.nan_to_num(0).sum(1)},
    )
    return check_op(op, args or arguments(), **parameters | changes)


def test_check_op_accepts_a_correct_op_and_keeps_the_arguments():
    args = arguments()
    before = {name: args[name].clone() for name in ("meta", "x", "hidden", "arrived")}
    launched, reference = check(op_of(add), args, options=dict(parts=3))
    assert all(torch.equal(args[name], value) for name, value in before.items())
    assert args["norm"].normed.isnan().all() and args["buffers"].sums.isnan().all()
    assert torch.equal(launched["hidden"], args["hidden"] + args["x"])
    assert torch.equal(launched["norm"].normed, reference["norm"].normed) and launched["norm"].normed.stride(0) == 2 * N
    check(op_of(add), tuple(args.values()))


def test_check_op_omits_an_absent_output():
    check(op_of(add), arguments(normed=False), tolerance={"hidden": 1e-6, "buffers.sums": 1e-5})


def test_check_op_accepts_rows_that_do_not_run_among_others():
    args = arguments()
    args["meta"][1, layout.STATUS] = layout.WAIT
    launched, _ = check(op_of(add), args, views={"buffers.sums": lambda sums: sums[:, 0]}, options=dict(parts=1))
    assert launched["norm"].normed[1].isnan().all() and torch.equal(launched["hidden"][1], args["hidden"][1])


def test_copies_of_tensors_share_storage_where_the_originals_do():
    def shift(x, first, second):
        first.copy_(x)
        second.add_(first)

    pool = random(2, N)
    args = random(N), pool[0], pool[:].view(-1)[N:]  # two views of one storage
    op = Op(shift, shift, lambda x, *rest: x.nbytes, outputs=("first",))
    launched, _ = check_op(op, args, accumulates=("second",))
    assert launched["first"].untyped_storage().data_ptr() == launched["second"].untyped_storage().data_ptr()


def wrong_value(args):
    args["norm"].normed[1, 4] += 0.1


def value_left_poisoned(args):
    args["norm"].normed[2, -1] = float("nan")


def write_where_the_reference_writes_nothing(args):
    args["norm"].normed[0] = 1.0  # row 0 does not run


def last_row_twice(args):
    """Write one row behind the last one: there is no such row."""
    hidden = args["hidden"]
    hidden.as_strided((N,), (1,), hidden.storage_offset() + ROWS * N).fill_(1.0)


def row_before_the_first(args):
    hidden = args["hidden"]
    hidden.as_strided((N,), (1,), hidden.storage_offset() - N).fill_(1.0)


def wide_row(args):
    """Write into the columns between the rows of a view."""
    normed = args["norm"].normed
    normed.as_strided((N + 1,), (1,), normed.storage_offset()).fill_(1.0)


def changed_input(args):
    args["x"][0, 0] += 1


def changed_input_in_an_object(args):
    args["norm"].weight[3] = 0


def counter_left(args):
    args["arrived"][1] = 1


WRONG = {
    wrong_value: "norm.normed: relative RMS error",
    value_left_poisoned: "norm.normed: 1 of 30 elements are NaN",
    write_where_the_reference_writes_nothing: "norm.normed: 10 of 30 elements are not NaN",
    last_row_twice: "launch writes in: memory outside of hidden",
    row_before_the_first: "launch writes in: memory outside of hidden",
    wide_row: "launch writes in: memory outside of norm.normed, buffers.room",
    changed_input: "launch writes in: x",
    changed_input_in_an_object: "launch writes in: norm.weight",
    counter_left: "launch writes in: arrived",
}


@pytest.mark.parametrize("fault, message", WRONG.items(), ids=[fault.__name__ for fault in WRONG])
def test_check_op_rejects(fault, message):
    def launch(meta, x, hidden, norm, buffers, arrived):
        add(meta, x, hidden, norm, buffers, arrived)
        if running(meta):
            fault(locals())

    args = arguments()
    args["meta"][0, layout.STATUS] = layout.STOP
    with pytest.raises(AssertionError, match=message):
        check(op_of(launch), args)


def test_check_op_rejects_an_output_that_the_launch_does_not_write():
    def launch(meta, x, hidden, norm, buffers, arrived):
        add(meta, x, hidden, Norm(norm.weight, None), buffers, arrived)

    with pytest.raises(AssertionError, match="norm.normed: 30 of 30 elements are NaN"):
        check(op_of(launch))


def test_check_op_rejects_an_output_that_the_reference_does_not_write():
    def idle(meta, x, hidden, norm, buffers, arrived):
        pass

    with pytest.raises(AssertionError, match="norm.normed: the reference writes nothing"):
        check(op_of(idle, ref=idle))


@pytest.mark.parametrize("form", ["launch", "reference"])
def test_check_op_rejects_a_write_in_idle_rows(form):
    def careless(meta, x, hidden, norm, buffers, arrived):
        add_ref(meta, x, hidden, norm, buffers, arrived)
        if not running(meta):
            norm.normed[1, 1] = 0

    op = op_of(careless) if form == "launch" else op_of(add, ref=careless)
    with pytest.raises(AssertionError, match=f"{form} of idle rows writes in: norm.normed"):
        check(op)
    check(op, idle=False)


def test_check_op_rejects_an_integer_that_differs():
    def count(x, counts):
        counts.copy_((x > 0).sum(1))

    def miscount(x, counts):
        counts.copy_((x > 0).sum(1) + torch.arange(len(x), device=x.device) // 2)

    args = random(ROWS, N), torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match="counts: 1 of 3 integers differ"):
        check_op(Op(miscount, count, lambda x, counts: 1, outputs=("counts",)), args, tolerance=1.0)


def test_the_error_is_relative_to_what_the_reference_changes():
    """Large elements that do not change do not hide the error of one that does."""

    def write(cache, value, factor=1.0):
        cache[0] = value * factor

    def write_wrong(cache, value):
        write(cache, value, 1.01)

    args = random(100, scale=1e6), 1.0
    op = Op(write_wrong, write, lambda cache, value: 4)
    check_op(op, args, tolerance=0.02, accumulates=("cache",))
    with pytest.raises(AssertionError, match="cache: relative RMS error 1.00e-02"):
        check_op(op, args, tolerance=0.005, accumulates=("cache",))


@pytest.mark.parametrize("value", [0, 4.0, None])
def test_check_op_requires_a_positive_int_of_bytes(value):
    with pytest.raises(AssertionError, match="bytes"):
        check(op_of(add, bytes=lambda *args: value))


def test_check_op_compares_the_size_if_it_is_known():
    check(op_of(add), moved=3 * ROWS * N * 4)
    with pytest.raises(AssertionError, match="bytes"):
        check(op_of(add), moved=1)


def test_check_op_rejects_unknown_names():
    for wrong in (dict(accumulates=("hiden",)), dict(scratch=("buffers.rom",)), dict(outputs=("norm.norm",))):
        with pytest.raises(AssertionError, match="are not tensors"):
            check(op_of(add), **wrong)
    for wrong in (dict(tolerance={"x": 1.0}), dict(views={"x": torch.sum})):
        with pytest.raises(AssertionError, match="are not outputs"):
            check(op_of(add), **wrong)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_check_op_rejects_an_allocation_and_a_launch_that_does_not_repeat():
    def allocate(x, out):
        out.copy_(torch.empty_like(x).copy_(x))

    calls = []

    def count_calls(x, out):
        calls.append(x)
        out.copy_(x)
        out.add_(float(len(calls)))

    def copy(x, out):
        out.copy_(x)

    def first_call(x, out):
        copy(x, out)
        out.add_(1.0)

    args = random(ROWS, N), poisoned(ROWS, N)
    kernels = (copy,)
    with pytest.raises(AssertionError, match="a launch allocates memory"):
        check_op(Op(allocate, copy, lambda x, out: 1, kernels, ("out",)), args)
    with pytest.raises(AssertionError, match="a launch differs from the first one in: out"):
        check_op(Op(count_calls, first_call, lambda x, out: 1, kernels, ("out",)), args)
    check_op(Op(copy, copy, lambda x, out: 1, kernels, ("out",)), args)
