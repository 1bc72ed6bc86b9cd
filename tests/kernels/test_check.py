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
    pool = poisoned(2, ROWS, 2 * N)  # normed and the scratch are views into a larger storage.
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
    check(op_of(add), tuple(args.values()), moved=3 * ROWS * N * 4)
    # The argument normed is absent.
    check(op_of(add), arguments(normed=False), tolerance={"hidden": 1e-6, "buffers.sums": 1e-5})
    args["meta"][1, layout.STATUS] = layout.WAIT
    launched, _ = check(op_of(add), args)
    assert launched["norm"].normed[1].isnan().all() and torch.equal(launched["hidden"][1], args["hidden"][1])


def test_copies_of_tensors_share_storage_where_the_originals_do():
    def shift(x, first, second):
        first.copy_(x)
        second.add_(first)

    pool = random(2, N)
    args = random(N), pool[0], pool[:].view(-1)[N:]  # Both arguments are views of one storage.
    op = Op(shift, shift, lambda x, *rest: x.nbytes, outputs=("first",))
    launched, _ = check_op(op, args, accumulates=("second",))
    assert launched["first"].untyped_storage().data_ptr() == launched["second"].untyped_storage().data_ptr()


def write_element(row, column, value):
    """Return a function that writes one element of `normed`."""
    return lambda args: args["norm"].normed[row].__setitem__(column, value)


def write_at(name, size, at):
    """Return a function that writes `size` elements of a tensor's storage, from an offset on."""

    def write(args):
        tensor = args["norm"].normed if name == "normed" else args[name]
        tensor.as_strided((size,), (1,), tensor.storage_offset() + at).fill_(1.0)

    return write


WRONG = {  # name: (an additional write of the launch, the expected message)
    "wrong value": (write_element(1, 4, 9.0), "norm.normed: relative RMS error"),
    "value left poisoned": (write_element(2, -1, float("nan")), "norm.normed: 1 of 30 elements are NaN"),
    "row that does not run": (write_element(0, slice(None), 1.0), "norm.normed: 10 of 30 elements are not NaN"),
    "row behind the last": (write_at("hidden", N, ROWS * N), "launch writes in: memory outside of hidden"),
    "row before the first": (write_at("hidden", N, -N), "launch writes in: memory outside of hidden"),
    "wide row": (write_at("normed", N + 1, 0), "launch writes in: memory outside of norm.normed, buffers.room"),
    "input": (lambda args: args["x"][0].add_(1), "launch writes in: x"),
    "input in an object": (lambda args: args["norm"].weight.zero_(), "launch writes in: norm.weight"),
    "counter": (lambda args: args["arrived"].add_(1), "launch writes in: arrived"),
}


@pytest.mark.parametrize("fault, message", WRONG.values(), ids=WRONG)
def test_check_op_rejects_a_wrong_launch(fault, message):
    def launch(meta, x, hidden, norm, buffers, arrived):
        add(meta, x, hidden, norm, buffers, arrived)
        if running(meta):
            fault(locals())

    args = arguments()
    args["meta"][0, layout.STATUS] = layout.STOP
    with pytest.raises(AssertionError, match=message):
        check(op_of(launch), args)


def test_check_op_rejects_other_wrong_ops():
    def partial(meta, x, hidden, norm, buffers, arrived):
        add(meta, x, hidden, Norm(norm.weight, None), buffers, arrived)

    def nothing(meta, x, hidden, norm, buffers, arrived):
        pass

    for op, message in (
        (op_of(partial), "norm.normed: 30 of 30 elements are NaN"),
        (op_of(nothing, ref=nothing), "norm.normed: the reference writes nothing"),
        *((op_of(add, bytes=lambda *args, value=value: value), "bytes") for value in (0, 4.0, None)),
    ):
        with pytest.raises(AssertionError, match=message):
            check(op)
    with pytest.raises(AssertionError, match="bytes"):
        check(op_of(add), moved=1)


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


def test_check_op_rejects_unknown_names():
    for wrong in (dict(accumulates=("hiden",)), dict(scratch=("buffers.rom",)), dict(outputs=("norm.norm",))):
        with pytest.raises(AssertionError, match="are not tensors"):
            check(op_of(add), **wrong)
    for wrong in (dict(tolerance={"x": 1.0}), dict(views={"x": torch.sum})):
        with pytest.raises(AssertionError, match="are not outputs"):
            check(op_of(add), **wrong)


@pytest.mark.skipif(not CUDA, reason="the test needs a GPU")
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
    with pytest.raises(AssertionError, match="the launch allocated memory"):
        check_op(Op(allocate, copy, lambda x, out: 1, kernels, ("out",)), args)
    with pytest.raises(AssertionError, match="a launch differs from the first one in: out"):
        check_op(Op(count_calls, first_call, lambda x, out: 1, kernels, ("out",)), args)
    check_op(Op(copy, copy, lambda x, out: 1, kernels, ("out",)), args)
