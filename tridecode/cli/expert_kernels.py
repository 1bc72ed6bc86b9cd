"""The kernels of experts and their launch configs, for `info --kernels`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from ..blocks.spec import ModelSpec
from ..blocks.weights import Weights
from ..kernels.device import Device
from ..kernels.linear.weight import LoadedLinear
from ..kernels.moe.arguments import ExpertSizes, Router
from ..step.decode import decode_pass
from ..step.dispatch import SIZES
from ..step.model import DecodeModel, linear_case, make_model
from ..step.prompt import read
from ..step.run import Launch, Recorder
from ..tuning.configs import PassConfigs
from ..tuning.report import KernelRow
from ..tuning.tables import scheme_name

PROMPTS = (16, 64, 256, 1024, 2048)  # Rows of the prompt passes that are listed.


def expert_rows(
    spec: ModelSpec, weights: Weights, configs: Mapping[int, PassConfigs], gpu: Device, batch_invariant: bool
) -> list[KernelRow]:
    """Return a row for each launch with experts' weights, and for passes of each size with another kernel or config.

    weights: may be on the meta device, because the passes are only recorded.
    """
    if not spec.has_experts:
        return []
    model = make_model(
        spec, weights, PROMPTS[-1], SIZES[-1], page=64, configs=configs, batch_invariant=batch_invariant,
        prompt_rows=PROMPTS[-1],
    )  # fmt: skip
    model = replace(model, gpu=gpu)
    decode = {rows: _decode(model, rows) for rows in SIZES}
    return [*_rows("", decode), *_rows("prompt ", {rows: _prompt(model, rows) for rows in PROMPTS})]


def _decode(model: DecodeModel, rows: int) -> list[Launch]:
    recorder = Recorder()
    decode_pass(recorder, model.for_rows(rows), "greedy")
    return recorder.launches


def _prompt(model: DecodeModel, rows: int) -> list[Launch]:
    recorder = Recorder()
    read(recorder, model, rows)
    return recorder.launches


def _rows(prefix: str, passes: Mapping[int, Iterable[Launch]]) -> list[KernelRow]:
    """Return the rows of passes by their size. Only the largest of several sizes with equal configs has a row."""
    rows_of: dict[tuple, list[KernelRow]] = {}
    for size, launches in passes.items():
        for row in (_row(prefix, size, launch) for launch in launches if _has_config(launch)):
            same = rows_of.setdefault(row[:4], [])
            if same and (same[-1].kernel, same[-1].config) == (row.kernel, row.config):
                same.pop()
            if row not in same:  # Layers repeat.
                same.append(row)
    return [row for rows in rows_of.values() for row in rows]


def _has_config(launch: Launch) -> bool:
    """Return whether a launch reads weights of experts or of their router."""
    return "config" in launch.options and any(isinstance(arg, ExpertSizes) for arg in launch.args)


def _row(prefix: str, size: int, launch: Launch) -> KernelRow:
    """Return the row of a launch. n and k are the sizes of the router, or of the weight of one expert."""
    sizes = next(arg for arg in launch.args if isinstance(arg, ExpertSizes))
    config, kernel = asdict(launch.options["config"]), launch.op.launch.__name__
    for arg in launch.args:
        if isinstance(arg, LoadedLinear):
            case = linear_case(arg, "plain")
            columns = case.n // sizes.stored, case.k, scheme_name(case)
        elif isinstance(arg, Router):
            columns = *arg.weight.shape, str(arg.weight.dtype).removeprefix("torch.")
    return KernelRow(prefix + launch.role, *columns, size, kernel, config, "rule")
