"""check_op: checks the rules of all ops with one call."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from util import PDL

from tridecode import layout
from tridecode.kernels.op import Op

# Bytes before and after a copied storage. The number is a multiple of each alignment that a kernel may assume.
GUARD = 1 << 14
IDLE = layout.WAIT, layout.STOP, layout.LIMIT_REACHED, layout.NAN


class Checked(NamedTuple):
    """The arguments by name after the launch, and after the reference."""

    launched: dict[str, Any]
    reference: dict[str, Any]


def check_op(
    op: Op,
    args: tuple | dict[str, Any],
    options: dict[str, Any] | None = None,
    tolerance: float | dict[str, float] = 0.0,
    *,
    outputs: Sequence[str] | None = None,
    accumulates: Sequence[str] = (),
    scratch: Sequence[str] = (),
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    idle: bool = True,
    moved: int | None = None,
    on_host: bool = False,
) -> Checked:
    """Check a launch of `op` against its reference and against the rules for launches.

    The reference and the launch run on copies of the arguments, in which outputs and scratch are poisoned (NaN; a large
    number in integers). Then:

    - Each output agrees with the reference: floats by relative RMS error, integers exactly. An element that the
      reference leaves poisoned must stay poisoned.
    - Nothing else is written: neither another argument, nor the memory around and between the outputs of a storage.
      Counters that must be zero between launches are such arguments.
    - If no row of the argument `meta` has the status RUN, the launch and the reference write nothing.
    - `op.bytes` takes the same arguments and returns a positive int.
    - On a GPU, if `op` has kernels: a launch allocates nothing, and a captured graph, replayed twice, leaves the same
      bits as the first launch; so does a dependent launch (`pdl=True`) from compute capability 9.0 on.

    Tensors are named by the parameter of `op.launch`. The name of a tensor inside an argument is dotted, with a field,
    an attribute or an index ("epilogue.normed", "caches.0"); the name of the argument alone means all tensors in it.

    Example::

        def test_add_norm(case):
            rows, n = case.sizes["rows"], case.sizes["n"]
            args = random(rows, n), random(rows, n, seed=1), norm_weight(n), poisoned(rows, n), 1e-6
            check_op(ADD_NORM, args, tolerance={"hidden": 1e-6, "out": 1e-5}, accumulates=("hidden",))

    Args:
        op: the op.
        args: the arguments of a launch, by position or by name. They are not changed. Tensors may share storage and may
            lie in tuples, dicts and objects.
        options: keyword arguments that only the launch takes, such as its config.
        tolerance: the maximum relative RMS error of floats, for all outputs or by output. The default 0 means equal.
            The error is relative to the elements that the reference changes.
        outputs: the tensors that a launch writes without reading their contents. The default is `op.outputs` without
            absent (None) tensors.
        accumulates: further outputs, or some of `outputs`, that a launch also reads, or writes only in part. They are
            not poisoned. The launch must not change elements that the reference does not change.
        scratch: tensors in which a launch may leave any values. They may be `outputs` or other tensors.
        views: the part of an output that is compared, for example the sum of partial sums.
        idle: whether to check that idle rows are not written, if there is an argument `meta`.
        moved: the value that `op.bytes` must return, if it is known.
        on_host: whether the reference runs on copies in host memory.

    Returns:
        The arguments of the launch and of the reference, for further assertions.
    """
    options, views = options or {}, views or {}
    arguments = _bound(op, args, options)
    roles = _roles(arguments, op.outputs if outputs is None else outputs, accumulates, scratch, outputs is not None)
    tolerances = tolerance if isinstance(tolerance, dict) else dict.fromkeys(roles.compared, tolerance)
    unknown = (tolerances.keys() | views.keys()) - set(roles.compared)
    assert not unknown, f"{sorted(unknown)} are not outputs; expected names from {roles.compared}"

    size = op.bytes(*arguments.values())
    assert isinstance(size, int) and (size > 0 if moved is None else size == moved), f"bytes: {size!r}"

    launch = partial(op.launch, **options)
    inputs = _Inputs(arguments)
    reference, launched = _Copy(arguments, roles, on_host), _Copy(arguments, roles)
    for copied, function, name in ((reference, op.ref, "reference"), (launched, launch, "launch")):
        copied.run(function)
        _fail_if(inputs.changes() + copied.changes(copied.start, besides=roles.written), f"the {name} writes in")
    problems = []
    for name in roles.compared:
        view = views.get(name, lambda tensor: tensor)
        expected, before = view(reference.tensors[name]), view(reference.initial(name))
        out = view(launched.tensors[name]).to(expected.device)
        if problem := _mismatch(out, expected, before, tolerances.get(name, 0.0), name in roles.poisoned):
            problems.append(f"{name}: {problem}")
    _fail_if(problems, "the launch differs from the reference")

    if idle and isinstance(arguments.get("meta"), torch.Tensor):
        for function, name in ((launch, "launch"), (op.ref, "reference")):
            copied = _Copy(arguments, roles)
            copied.idle()
            copied.run(function)
            _fail_if(inputs.changes() + copied.changes(copied.start), f"the {name} of idle rows writes in")
    if torch.cuda.is_available() and op.kernels:
        _check_on_gpu(op, options, _Copy(arguments, roles), launched.buffers, roles.scratch)
        _fail_if(inputs.changes(), "a replay writes in")
    return Checked(launched.arguments, reference.arguments)


class _Roles(NamedTuple):
    """Names of the tensors that a launch writes."""

    compared: list[str]
    poisoned: list[str]
    scratch: list[str]

    @property
    def written(self) -> list[str]:
        return self.compared + self.scratch


def _roles(arguments, outputs, accumulates, scratch, strict: bool) -> _Roles:
    """Resolve the names that check_op takes; `strict`: each output must be there."""
    leaves = dict(_leaves(arguments))

    def resolve(names, strict=True) -> list[str]:
        matches = {name: [leaf for leaf in leaves if leaf == name or leaf.startswith(f"{name}.")] for name in names}
        absent = [name for name in names if not matches[name] and (strict or name.split(".")[0] not in arguments)]
        assert not absent, f"{absent} are not tensors of the arguments; expected names from {list(leaves)}"
        return [leaf for named in matches.values() for leaf in named if leaves[leaf] is not None]

    accumulates = resolve(accumulates)
    scratch = [name for name in resolve(scratch) if name not in accumulates]
    pure = [name for name in resolve(outputs, strict) if name not in accumulates + scratch]
    assert pure + accumulates, "the op declares no output"
    return _Roles(pure + accumulates, pure + scratch, scratch)


class _Inputs:
    """The contents of all arguments before any run."""

    def __init__(self, arguments):
        self.storages = {}
        for name, tensor in _tensors(arguments):
            bits = _bits(tensor.untyped_storage())
            names, _, _ = self.storages.setdefault(_address(tensor), ([], bits, bits.clone()))
            names.append(name)

    def changes(self) -> list[str]:
        return [", ".join(names) for names, bits, before in self.storages.values() if not torch.equal(bits, before)]


class _Copy:
    """A copy of the arguments. Storages that a launch may write lie between guard bands; the others are shared."""

    def __init__(self, arguments, roles: _Roles, on_host: bool = False):
        originals = dict(_tensors(arguments))
        copied = {_address(originals[name]) for name in originals if on_host or name in [*roles.written, "meta"]}
        self.buffers: dict[int, torch.Tensor] = {}  # The bytes of each copied storage, with guard bands.
        memo = {}
        for tensor in originals.values():
            address = _address(tensor)
            if address in copied and address not in self.buffers:
                self.buffers[address] = _guarded(tensor, on_host)
            memo[id(tensor)] = _placed(tensor, self.buffers[address], GUARD) if address in copied else tensor
        self.arguments = copy.deepcopy(arguments, memo)
        self.tensors = dict(_tensors(self.arguments))
        self.address = {name: _address(tensor) for name, tensor in originals.items()}
        for name in roles.poisoned:
            tensor = self.tensors[name]
            tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 3)
        self.start = {address: buffer.clone() for address, buffer in self.buffers.items()}

    def run(self, function: Callable) -> None:
        """Call a launch or a reference. Wait for both sides: a dependent launch may read before `gdc_wait`."""
        _synchronize()
        function(*self.arguments.values())
        _synchronize()

    def reset(self) -> None:
        for address, buffer in self.buffers.items():
            buffer.copy_(self.start[address])
        _synchronize()

    def idle(self) -> None:
        """Give every row a status other than RUN."""
        status = self.arguments["meta"][:, layout.STATUS]
        status.copy_(torch.tensor([IDLE[row % len(IDLE)] for row in range(len(status))]))
        self.start = {address: buffer.clone() for address, buffer in self.buffers.items()}

    def initial(self, name: str) -> torch.Tensor:
        """The tensor as it was before any run."""
        return _placed(self.tensors[name], self.start[self.address[name]])

    def changes(self, expected: dict[int, torch.Tensor], besides: Sequence[str] = ()) -> list[str]:
        """Return the places at which bytes differ from the expected bytes, except in the tensors `besides`."""
        places = []
        for address, buffer in self.buffers.items():
            differs = buffer != expected[address]
            names = [name for name in self.tensors if self.address[name] == address]
            for name in besides:
                if name in names:
                    _bytes_of(self.tensors[name], differs).fill_(False)
            if differs.any():
                changed = [name for name in names if _bytes_of(self.tensors[name], differs).any()]
                where = ", ".join(changed) or f"memory outside of {', '.join(names)}"
                places.append(f"{where} (byte {int(differs.to(torch.uint8).argmax()) - GUARD} of the storage)")
        return places


def _check_on_gpu(op: Op, options, copied: _Copy, expected, scratch) -> None:
    """Check that launches repeat bit by bit, allocate nothing and can be captured, with dependent launch too."""
    variants = [options]
    if "pdl" in inspect.signature(op.launch).parameters.keys() - options.keys():
        variants += [options | {"pdl": True}] if PDL else []
    for keywords in variants:
        launch = partial(op.launch, **keywords)
        prefix = "with pdl=True " if keywords is not options else ""
        copied.reset()
        copied.run(launch)  # The first launch compiles the kernel.
        _fail_if(copied.changes(expected, besides=scratch), f"{prefix}a launch differs from the first one in")

        copied.reset()
        allocated = _allocations()
        copied.run(launch)
        assert _allocations() == allocated, f"{prefix}the launch allocated memory"

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch(*copied.arguments.values())
        for _ in range(2):
            copied.reset()
            graph.replay()
            _synchronize()
            _fail_if(copied.changes(expected, besides=scratch), f"{prefix}a replay differs from the launch in")


def _mismatch(out, expected, before, tolerance: float, poisoned: bool) -> str:
    """The reason why an output is wrong, or an empty string."""
    if out.shape != expected.shape:
        return f"shape {list(out.shape)} instead of {list(expected.shape)}"
    if expected.is_floating_point():
        out, expected, before = out.double(), expected.double(), before.double()
    unchanged = (expected == before) | (expected.isnan() & before.isnan())
    if poisoned and unchanged.all():
        return "the reference writes nothing"
    same = (out == expected) | (out.isnan() & expected.isnan())
    if same.all():
        return ""
    if not expected.is_floating_point():
        return f"{int((~same).sum())} of {same.numel()} integers differ"
    finite = expected.isfinite()
    if wrong := int((~same & ~finite).sum()):
        return f"{wrong} of {same.numel()} elements are not NaN or infinite as in the reference"
    if wrong := int((out.isnan() & finite).sum()):
        return f"{wrong} of {same.numel()} elements are NaN"
    error = ((out - expected)[~same].norm() / expected[finite & ~unchanged].norm()).item()
    return "" if error <= tolerance else f"relative RMS error {error:.2e}, tolerance {tolerance:.0e}"


def _bound(op: Op, args, options) -> dict[str, Any]:
    """The positional arguments of a launch by name, with defaults."""
    signature = inspect.signature(op.launch)
    bound = signature.bind(**args, **options) if isinstance(args, dict) else signature.bind(*args, **options)
    bound.apply_defaults()
    keywords = {name for name, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return {name: value for name, value in bound.arguments.items() if name not in keywords}


def _leaves(value, name: str = "") -> Iterator[tuple[str, torch.Tensor | None]]:
    """All tensors in tuples, dicts and objects, and each None, with dotted names."""
    if value is None or isinstance(value, torch.Tensor):
        yield name, value
        return
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    elif not isinstance(value, dict):
        value = {} if callable(value) else getattr(value, "__dict__", {})
    for key, part in value.items():
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _tensors(arguments) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, leaf) for name, leaf in _leaves(arguments) if leaf is not None)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _bits(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _guarded(tensor: torch.Tensor, on_host: bool) -> torch.Tensor:
    """The bytes of the tensor's storage between guard bands, which are NaN in every floating-point type."""
    bits = _bits(tensor.untyped_storage())
    device = torch.device("cpu") if on_host else bits.device
    buffer = torch.full((len(bits) + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=device)
    if tensor.is_pinned() and not on_host:
        buffer = buffer.pin_memory()
    buffer[GUARD:-GUARD] = bits
    return buffer


def _placed(tensor: torch.Tensor, buffer: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A tensor with the same shape and strides in `buffer`, `offset` bytes further than in its storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device=buffer.device)
    at = tensor.storage_offset() + offset // tensor.itemsize
    return empty.set_(buffer.untyped_storage(), at, tensor.shape, tensor.stride())


def _bytes_of(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The part of `mask`, one element for each byte of a buffer, that belongs to `tensor`: [*shape, itemsize]."""
    size = tensor.itemsize
    strides = [size * stride for stride in tensor.stride()]
    return mask.as_strided((*tensor.shape, size), (*strides, 1), size * tensor.storage_offset())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _allocations() -> int:
    """The number of allocations of GPU memory so far."""
    return torch.cuda.memory_stats().get("allocation.all.allocated", 0)


def _fail_if(problems: list[str], summary: str) -> None:
    assert not problems, f"{summary}: {'; '.join(problems)}"
