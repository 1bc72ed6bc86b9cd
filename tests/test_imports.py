"""Rules for imports between the folders of the package. A folder imports only from lower folders, without circles."""

import ast
import importlib
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from models import CUDA

from tridecode.kernels.linear.project import LinearKernel
from tridecode.kernels.op import Op

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tridecode"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}
KERNELS = [name for name in MODULES if name.startswith("kernels.")]


def imports(name: str) -> dict[str, set[str]]:
    """Return imported module -> imported names. Modules of tridecode have no prefix, for example "kernels.embed".

    Imports for annotations only, below `if TYPE_CHECKING`, do not count.
    """
    tree, package = ast.parse(MODULES[name].read_text()), name.split(".")[:-1]
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {node for block in typing for statement in block.body for node in ast.walk(statement)}
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".") if node.level else node.module
            for alias in node.names:
                whole = f"{module}.{alias.name}".strip(".")
                if node.level and whole in MODULES:  # `from . import layout` imports a module.
                    found.setdefault(whole, set())
                else:
                    found.setdefault(module, set()).add(alias.name)
    return found


# Modules that every folder may import. They import only each other.
BASE = {"arguments", "errors", "layout", "tensors", "results", "sampling", "version"}
# folder: other folders that it may import. Every folder may also import BASE.
ROOMS = {
    "kernels": set(),
    "blocks": {"kernels"},
    "models": {"blocks"},
    "checkpoint": {"models", "blocks", "kernels"},
    "text": {"models"},
    "state": {"kernels", "blocks"},
    "tuning": {"kernels"},
    "step": {"blocks", "kernels", "state", "tuning"},
    "serve": {"step", "state", "text"},
    "options": set(),
    "plan": {"options", "blocks", "checkpoint", "kernels", "state", "step", "text", "tuning"},
}
ROOMS |= {name: BASE for name in BASE}
ENGINE = {"options", "plan", "serve", "step", "state", "checkpoint", "text", "blocks", "tuning"}
ROOMS["engine"] = ENGINE
ROOMS["server"] = {"engine", "options", "serve", "text", "plan"}
ROOMS["fleet"] = {"server", "engine", "options", "checkpoint"}


def room(module: str) -> str:
    return module.split(".")[0]


def test_the_reader_of_imports_sees_them():
    assert "kernels.embed" in imports("step.decode") and "EMBED" in imports("step.decode")["kernels.embed"]
    assert "step.decode" in imports("step.graphs")
    assert "errors" in imports("cli.explain")
    assert "step.model" not in imports("step.hosted"), "an import for annotations was counted"


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) in ROOMS])
def test_rooms_import_from_those_below(name):
    used = {room(module) for module in imports(name) if module in MODULES} - {room(name)}
    assert used <= ROOMS[room(name)] | BASE


def test_every_room_has_its_rule():
    assert {room(name) for name in MODULES} == {*ROOMS, "cli", "__main__"}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_know_triton_and_torch(name):
    others = {module.split(".")[0] for module in imports(name) if module not in MODULES}
    assert others <= sys.stdlib_module_names | {"torch", "triton", ""}  # "" is a relative import within the package.


def test_no_module_imports_itself_over_others():
    below = {name: {module for module in imports(name) if module in MODULES} for name in MODULES}
    while leaves := {name for name in below if not below[name]}:
        below = {name: needed - leaves for name, needed in below.items() if name not in leaves}
    assert not below, f"these modules are in a circular import, or import such modules: {sorted(below)}"


@pytest.mark.parametrize("module", ["step.decode", "step.prompt", "blocks.attention", "blocks.block", "blocks.mlp"])
def test_the_lists_name_operations_only(module):
    """Modules that list launches import only ops, types of their arguments, and sizes of their outputs."""
    taken = [name for source, names in imports(module).items() if source in KERNELS for name in names]
    assert taken and all(name[0].isupper() or name.endswith("_partials") for name in taken)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "kernels.op"])
def test_an_op_in_all_its_forms_takes_the_same_arguments(name):
    module = importlib.import_module(f"tridecode.{name}")
    values = [value.op if isinstance(value, LinearKernel) else value for value in vars(module).values()]
    ops = {op.launch: op for op in values if isinstance(op, Op)}
    assert ops or not hasattr(module, name.split(".")[-1]), (
        f"{name} has a launcher without an Op, so no list can run it"
    )
    how = ("config", "pdl", "followed")
    for launcher, op in ops.items():
        arguments = [argument for argument in signature(launcher).parameters if argument not in how]
        assert list(signature(op.ref).parameters) == arguments, launcher
        signature(op.bytes).bind(*arguments)
        assert {output.split(".")[0] for output in op.outputs} <= set(arguments), launcher


def test_cli_is_the_commands_main():
    tree = ast.parse((ROOT / "cli.py").read_text())
    modules = {
        n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
    }
    assert modules == {"sys", "tridecode.cli"}
    assert 'tridecode = "tridecode.cli:main"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.skipif(CUDA, reason="prompt passes on a GPU import one of these modules")
def test_no_start_waits_for_torchs_compiler():
    code = "import sys; from tridecode import Engine, cli, SamplingParams; engine = Engine.load(); "
    code += "[engine.generate(text, SamplingParams(max_tokens=2)) for text in ('Hello', 'Hello to you')]; "
    code += "print([name for name in ('torch._dynamo', 'torch._inductor', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
