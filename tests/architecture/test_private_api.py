"""Every name that our code uses without its owner's promise, and what happens when it goes.

An underscore says that a name may change in any release. Each such name of torch, numpy, torchmetrics,
jsonargparse or CPython that `src` uses is listed here, and so is what `ctypes` calls. A new one fails the
test, and so does one that the installed version no longer has: `make test-oldest` runs this with the oldest
torch that is supported. The checker is tested on fake sources.
"""

import argparse
import ast
import ctypes
import importlib
import inspect
import re
from collections.abc import Callable, Collection
from functools import reduce
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

SRC = Path(__file__).parents[2] / "src" / "lanewise"
OWN = {"_init_arguments", "_numbers"}
"""Private names of our own that are used of another object than `self`: of a class in the same file, and the
arguments that a `Task` notes for commands/jobs/api.py."""
DOCUMENTED = {"_asdict", "_fields", "_replace", "_exit"}
"""Public in spite of the underscore: the methods of named tuples, and `os._exit`."""
IN_TEXT = re.compile(r"\b(?:torch|numpy)(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*", re.IGNORECASE)


def is_private(name: str) -> bool:
    """Whether the last name, or one before it, begins with one underscore."""
    return any(re.match(r"_(?!_)", part) and part not in DOCUMENTED for part in name.split("."))


def foreign_names(tree: ast.Module) -> dict[str, str]:
    """What the names that a module imports from other packages stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                names[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {local: name for local, name in names.items() if name.partition(".")[0] != "lanewise"}


def defined_names(tree: ast.Module) -> set[str]:
    """The names of functions, classes, variables and attributes of `self` that a module defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


class PrivateUses(ast.NodeVisitor):
    """Finds the private names of others that a module uses.

    A name that is imported is written as a whole. Of an object whose type the source does not tell there is
    a dot and the name of the attribute. What a class shares with a base class of another package follows the
    base class and a colon.
    """

    def __init__(self, tree: ast.Module, own: Collection[str]) -> None:
        self.found: set[str] = set()
        self._foreign = foreign_names(tree)
        self._own = {*own, *defined_names(tree)}
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.update(alias.name for alias in node.names if is_private(alias.name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found.update(filter(is_private, foreign_names(ast.Module([node], [])).values()))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._whole(node)
        if name is not None:
            if is_private(name) or re.match(r"ctypes\.\w*DLL", name):
                self.found.add(name)
            return  # what it is an attribute of says no more
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if is_private(node.attr) and node.attr not in (self._own if is_self else OWN):
            self.found.add(f".{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) in ("delattr", "getattr", "hasattr", "setattr"):
            base, attribute, *_ = node.args
            if isinstance(attribute, ast.Constant) and is_private(attribute.value):
                self.found.add(f"{self._whole(base) or ''}.{attribute.value}")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        defined = list(filter(is_private, defined_names(ast.Module([node], []))))
        for base in filter(None, map(self._whole, node.bases)):
            owner = resolve(base)
            self.found.update(f"{base}:{name}" for name in defined if uses(owner, name))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.update(IN_TEXT.findall(node.value))

    def _whole(self, node: ast.AST) -> str | None:
        """What a chain of attributes that begins with an imported name stands for."""
        if isinstance(node, ast.Name):
            return self._foreign.get(node.id)
        base = self._whole(node.value) if isinstance(node, ast.Attribute) else None
        return base and f"{base}.{node.attr}"


def private_uses(source: str, own: Collection[str] = ()) -> set[str]:
    """What `PrivateUses` finds in a source, where `self` may have private names of our own modules."""
    return PrivateUses(ast.parse(source), own).found


def resolve(name: str) -> Any:
    """Import what a whole name stands for; AttributeError or ImportError where there is no such thing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[length:], module)
    raise ImportError(f"there is no module {parts[0]}")


def uses(owner: Any, name: str) -> bool:
    """Whether an object has an attribute, or is a class whose own methods ask for it."""
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    members = [member for base in owner.__mro__ for member in vars(base).values()]
    methods = [member for member in members if isinstance(member, FunctionType)]
    annotated = any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__)
    return annotated or any(name in method.__code__.co_names for method in methods)


def exists(name: str, owner: Callable[[], Any] | None) -> bool:
    """Whether what is installed has a private name; its owner is needed where the name begins with a dot."""
    if owner is not None:
        return uses(owner(), name.rpartition(".")[2])
    base, _, shared = name.partition(":")
    try:
        found = resolve(base)
    except (ImportError, AttributeError):
        return False
    return not shared or uses(found, shared)


class Private(NamedTuple):
    """What is to be known of a private name."""

    modules: str
    """Those of src/lanewise that use it."""
    why: str
    """Why no public name does."""
    without: str
    """What happens where it is gone."""
    owner: Callable[[], Any] | None = None
    """Makes an object, or returns a class, that has it; None: the name says where it is."""


OF_TARGETS = (
    "tells over which targets a loss is a mean, and whether there are none",
    "nothing else; such a mean that is returned bare is not warned of, nor one over nothing explained",
    lambda: type(nn.functional.nll_loss(torch.ones(1, 1, requires_grad=True), torch.zeros(1).long()).grad_fn),
)

PYTREE = (
    "takes containers apart and puts them together again; torch has no public name for it",
    "ImportError in every run; the package optree has the same functions",
)
FOREACH = (
    "one call for all gradients or buffers instead of a kernel for each",
    "AttributeError in a step; a loop over the tensors does the same, more slowly",
)
FAKE_TENSORS = (
    "tensors without memory; torch's documentation names it, and has no public module for it",
    "ImportError in `lanewise plan` alone, which could measure real tensors",
)
DISPATCH = (
    "sees every operator; torch documents it by this name, in its notes on extending torch",
    "ImportError in `plan`, `bench` and `verify` alone",
)
TABLES = (
    "a module's tables by name, in which buffers can be looked up and replaced at once",
    "AttributeError; named_buffers and setattr do the same, more slowly",
)
LAZY = (
    "tells without a look at its values whether a lane wrote a large buffer",
    "AttributeError in the second step of a model that has a buffer of more than 16,384 elements",
)
VERSION = (
    "counts the changes of a tensor in place; torch documents what it is, not the name",
    "AttributeError; only a copy of each tensor would show a change",
)
METRICS = (
    "what a torchmetrics.Metric declares of its states: torchmetrics has no public list of them",
    "every metric is refused with a TaskError, or AttributeError when states are merged",
)
DDP = (
    "tells torch's DDP, in a backward, of each parameter that this backward will not come to",
    "AttributeError in the first backward of ddp",
)
FSDP = (
    "what torch's FSDP2 keeps of the parameters that it gathers together",
    "AttributeError under fsdp, at the start or in an evaluation",
)
LOADER = (
    "is where a loader asks its sampler for indices and gives out batches",
    "AttributeError at the start of a program that `lanewise verify` observes, or samples are not known",
)
MESSAGE = (
    "is how torch calls the error whose remedy is shown",
    "the error is shown without the remedy",
)
DYNAMO = (
    "torch documents the switches of torch.compile by these names, and has no others",
    "ImportError or AttributeError at the start of a run in exact, or of one that compiles",
)

PRIVATE = {
    # Ray
    "ray._private.services.get_ray_address_from_environment": Private(
        "launch/ray.py",
        "finds the cluster as ray.init does, which asks a dead one again and again, for ever",
        "ImportError with distributed.launcher ray alone; ray.init finds the cluster itself",
    ),
    # torch, by whole names
    "torch._C._autograd._top_saved_tensors_default_hooks": Private(
        "engine/transforms/checkpointed.py",
        "gives the hooks that torch.utils.checkpoint has set, which the errors of a block are added to",
        "AttributeError in the first forward with activation checkpointing",
    ),
    "torch._C._distributed_c10d._dump_fr_trace_json": Private(
        "processes/watch/collectives.py",
        "gives torch's record of collectives, whose public form is a file of pickles",
        "no line in the report of a stall that compares the ranks' collectives",
    ),
    "torch._C._current_autograd_node": Private(
        "commands/verify/operators.py",
        "says which backward an operator belongs to",
        "AttributeError in `lanewise verify` when it searches the operator; the reports would lack the place",
    ),
    "torch._C._current_graph_task_id": Private(
        "reduce/ddp.py", "tells a backward inside of a backward, as a checkpointed block has it", DDP[1]
    ),
    "torch._C._will_engine_execute_node": Private("reduce/ddp.py", *DDP),
    "torch.utils.data.dataloader._BaseDataLoaderIter": Private(
        "commands/verify/foreign/on_path/lanewise_observer/hooks.py", *LOADER
    ),
    "torch._compile._disable_dynamo": Private(
        "engine/transforms/checkpointed.py",
        "is torch.compiler.disable, whose first call takes seconds as it imports the compiler",
        "ImportError in every run; torch.compiler.disable does the same",
    ),
    "torch._dynamo": Private(
        "processes/device/determinism.py launch/fork_client.py",
        "is imported once for all workers, as every optimizer imports it",
        "ImportError when workers start; without the line each takes seconds longer",
    ),
    "torch._dynamo.config": Private("processes/device/determinism.py", *DYNAMO),
    "torch._dynamo.config.accumulated_recompile_limit": Private("processes/device/determinism.py", *DYNAMO),
    "torch._dynamo.config.automatic_dynamic_shapes": Private("processes/device/determinism.py", *DYNAMO),
    "torch._dynamo.config.fail_on_recompile_limit_hit": Private("processes/device/determinism.py", *DYNAMO),
    "torch._dynamo.config.recompile_limit": Private(
        "processes/device/determinism.py engine/step/lane_error.py", *DYNAMO
    ),
    "torch._dynamo.exc.FailOnRecompileLimitHit": Private("engine/step/lane_error.py", *MESSAGE),
    "torch._dynamo.utils.counters": Private(
        "engine/transforms/compile.py",
        "counts graph breaks by their reason",
        "ImportError with compile; graph breaks would not be logged",
    ),
    "torch._dynamo.utils.get_compilation_metrics": Private(
        "engine/transforms/compile.py",
        "says what was compiled again, and why",
        "ImportError with compile; recompilations would not be logged",
    ),
    "torch._foreach_add_": Private("reduce/pending.py", *FOREACH),
    "torch._foreach_copy_": Private("engine/buffers/pack.py", *FOREACH),
    "torch._foreach_div_": Private("reduce/reducer.py", *FOREACH),
    "torch._foreach_norm": Private("reduce/fsdp.py reduce/reducer.py", *FOREACH),
    "torch._inductor.config": Private("engine/transforms/compile.py", *DYNAMO),
    "torch._inductor.config.fallback_random": Private("engine/transforms/compile.py", *DYNAMO),
    "torch._subclasses.fake_tensor.FakeTensor": Private("commands/plan/real_sizes.py", *FAKE_TENSORS),
    "torch._subclasses.fake_tensor.FakeTensorMode": Private(
        "commands/plan/measure.py commands/plan/update.py", *FAKE_TENSORS
    ),
    "torch._subclasses.fake_tensor.unset_fake_temporarily": Private(
        "commands/plan/real_sizes.py", *FAKE_TENSORS
    ),
    "torch.autograd.graph._engine_run_backward": Private(
        "reduce/reducer.py",
        "runs a backward without the checks of Tensor.backward, which take long beside those of small models",
        "Tensor.backward is called instead",
    ),
    "torch.distributed._broadcast_coalesced": Private(
        "processes/world/world.py",
        "sends tensors as DDP does; dist.broadcast mistakes a sliced tensor for a contiguous one",
        "AttributeError at the start of ddp; a broadcast of a contiguous copy of each tensor does the same",
    ),
    "torch.distributed.distributed_c10d._get_default_store": Private(
        "processes/world/machine.py",
        "gives the store at which the processes have met",
        "AttributeError in local_rank_zero_first alone",
    ),
    "torch.distributed.distributed_c10d._world.pg_map": Private(
        "processes/world/world.py",
        "lists the process groups, whose collectives are counted",
        "AttributeError; verify could not tell that ranks call different numbers of collectives",
    ),
    "torch.nn.modules.batchnorm._BatchNorm": Private(
        "reduce/blocks.py engine/transforms/sync_batch_norm.py",
        "is the base of BatchNorm of all dimensions; torch's own convert_sync_batchnorm asks for it",
        "AttributeError; the classes of one, two and three dimensions can be named one by one",
    ),
    "torch.nn.modules.batchnorm._NormBase": Private(
        "commands/plan/measure.py",
        "is the base of all modules that keep statistics: their kernels write these without a new version",
        "AttributeError in `lanewise plan` alone; the classes can be named one by one",
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Private(
        "processes/device/live_storage.py commands/plan/real_sizes.py commands/verify/operators.py", *DISPATCH
    ),
    "torch.utils._pytree.TreeSpec": Private(
        "engine/transforms/checkpointed.py commands/verify/interaction.py", *PYTREE
    ),
    "torch.utils._pytree.keystr": Private("engine/step/lane_error.py", *PYTREE),
    "torch.utils._pytree.tree_flatten": Private(
        "engine/transforms/checkpointed.py commands/verify/interaction.py", *PYTREE
    ),
    "torch.utils._pytree.tree_flatten_with_path": Private("engine/step/lane_error.py", *PYTREE),
    "torch.utils._pytree.tree_leaves": Private(
        "processes/device/live_storage.py commands/plan/real_sizes.py", *PYTREE
    ),
    "torch.utils._pytree.tree_map_only": Private("commands/plan/real_sizes.py", *PYTREE),
    "torch.utils._pytree.tree_unflatten": Private(
        "engine/transforms/checkpointed.py commands/verify/interaction.py", *PYTREE
    ),
    "torch.utils.data._utils.worker": Private(
        "data/stream.py",
        "has the worker info, which is hidden from a stream while it is read",
        "datasets.IterableDataset yields a part of its samples in a loader worker, as others that ask for it",
    ),
    "torch.utils.data._utils.worker._worker_info": Private("data/stream.py", "as above", "as above"),
    # torch, of objects
    "._next_index": Private(
        "commands/verify/foreign/on_path/lanewise_observer/hooks.py",
        *LOADER,
        lambda: resolve("torch.utils.data.dataloader._BaseDataLoaderIter"),
    ),
    "._reset": Private(
        "commands/verify/foreign/on_path/lanewise_observer/hooks.py",
        *LOADER,
        lambda: resolve("torch.utils.data.dataloader._BaseDataLoaderIter"),
    ),
    "._autograd_hook": Private("reduce/ddp.py", *DDP, lambda: dist.Reducer),
    "._backward_hooks": Private(
        "reduce/build.py",
        "tells whether the user has a hook for the gradient of a parameter",
        "AttributeError under data_parallel",
        lambda: torch.Tensor,
    ),
    "._buffers": Private(
        "runs/checkpoint/model_file.py engine/buffers/pack.py engine/state/left_out.py "
        "engine/transforms/checkpointed.py",
        *TABLES,
        nn.Module,
    ),
    "._cdata": Private(
        "processes/device/live_storage.py",
        "tells one storage from another; storages of fake tensors all have the data pointer 0",
        "AttributeError in `lanewise plan` alone, which counts memory with it",
        lambda: torch.UntypedStorage(0),
    ),
    "._compiled_call_impl": Private(
        "engine/transforms/activation_checkpointing.py",
        "tells a module that Module.compile has compiled",
        "AttributeError with activation checkpointing",
        nn.Module,
    ),
    "._forward_hooks": Private(
        "hugging_face/trainer.py",
        "holds hooks that transformers registered, and only who registers a hook can remove it publicly",
        "AttributeError in lanewise.hugging_face.train; models whose hidden states were recorded need a copy",
        nn.Module,
    ),
    "._fsdp_param_group": Private(
        "reduce/fsdp_group.py",
        *FSDP,
        lambda: resolve("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"),
    ),
    "._get_fsdp_state": Private(
        "reduce/fsdp_group.py", *FSDP, lambda: resolve("torch.distributed.fsdp.FSDPModule")
    ),
    "._get_sequence_number_for_group": Private(
        "processes/world/world.py",
        "counts the collectives of a process group",
        "AttributeError; verify could not tell that ranks call different numbers of collectives",
        lambda: dist.ProcessGroup,
    ),
    "._indices": Private(
        "engine/transforms/checkpointed.py",
        "the public method wants a sparse tensor coalesced, which is another one",
        "AttributeError for a checkpointed block that takes a sparse tensor",
        lambda: torch.Tensor,
    ),
    "._is_in_bad_fork": Private(
        "processes/device/accelerator.py",
        "torch.manual_seed asks it before it seeds mps, which has no is_initialized",
        "AttributeError on mps",
        lambda: torch.mps,
    ),
    "._is_zerotensor": Private(
        "data/digest.py",
        "tells a tensor of zeros without memory, which forward-mode differentiation makes",
        "AttributeError when such a tensor is compared",
        lambda: torch.Tensor,
    ),
    "._orig_mod": Private(
        "engine/transforms/activation_checkpointing.py",
        "tells what torch.compile has made of a module; torch's documentation has the name in state dicts",
        "no error says that the blocks of a compiled module cannot be checkpointed",
        lambda: resolve("torch._dynamo.eval_frame.OptimizedModule"),
    ),
    "._parameters": Private("engine/transforms/checkpointed.py", *TABLES, nn.Module),
    "._post_accumulate_grad_hooks": Private(
        "reduce/build.py",
        "as _backward_hooks",
        "AttributeError under data_parallel",
        lambda: torch.Tensor,
    ),
    "._post_forward_indices": Private(
        "reduce/fsdp_group.py",
        *FSDP,
        lambda: resolve("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"),
    ),
    "._register_pre_backward_hook": Private(
        "reduce/fsdp_group.py",
        "torch gathers a block again for outputs in a dataclass from 2.13 on; before, it is asked to by this",
        "with torch before 2.13 AttributeError under fsdp; later it is not asked for",
        lambda: resolve("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"),
    ),
    "._saved_dim": Private(
        "engine/step/guard/first_step.py",
        "tells terms that are added up from samples: what was averaged or stacked along the first dimension",
        "nothing else; a sum over several means is warned of",
        lambda: type(torch.ones(1, 1, requires_grad=True).mean(0).grad_fn),
    ),
    "._saved_ignore_index": Private("engine/step/target_mean.py", *OF_TARGETS),
    "._saved_reduction": Private(
        "engine/step/guard/first_step.py engine/step/target_mean.py",
        'tells the reductions "sum" and "mean" of losses of torch',
        "nothing else; a bare loss by it is taken as a mean over samples without a warning",
        lambda: type(nn.MSELoss()(torch.ones(1, requires_grad=True), torch.ones(1)).grad_fn),
    ),
    "._saved_target": Private("engine/step/target_mean.py", *OF_TARGETS),
    "._saved_total_weight": Private("engine/step/target_mean.py", *OF_TARGETS),
    "._saved_weight": Private("engine/step/target_mean.py", *OF_TARGETS),
    "._schema": Private(
        "commands/verify/operators.py",
        "tells whether an operator changes its arguments",
        "AttributeError in `lanewise verify` when it searches the operator",
        lambda: torch.ops.aten.add.Tensor,
    ),
    "._unsharded_param": Private(
        "reduce/fsdp_group.py",
        "zeros are sent for a parameter that a lane does not use, for which torch has a switch from 2.13 on",
        "with torch before 2.13 ranks would hang or add unlike parts; later it is not asked for",
        lambda: resolve("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"),
    ),
    "._values": Private(
        "engine/transforms/checkpointed.py",
        "as _indices",
        "AttributeError for a checkpointed block that takes a sparse tensor",
        lambda: torch.Tensor,
    ),
    "torch._lazy_clone": Private("engine/buffers/pack.py", *LAZY, lambda: torch),
    "torch._C._data_address": Private("engine/buffers/pack.py", *LAZY, lambda: torch._C),
    "._version": Private(
        "engine/buffers/pack.py engine/step/guard/changed_parameters.py "
        "engine/step/guard/foreign_gradients.py engine/own_loop/steps.py commands/plan/measure.py "
        "commands/verify/probe.py",
        *VERSION,
        lambda: torch.Tensor,
    ),
    # torchmetrics and jsonargparse
    "._defaults": Private("metrics/merge.py", *METRICS, lambda: resolve("torchmetrics.Metric")),
    "._reductions": Private("metrics/merge.py", *METRICS, lambda: resolve("torchmetrics.Metric")),
    "._to_sync": Private("metrics/merge.py", *METRICS, lambda: resolve("torchmetrics.Metric")),
    "._update_count": Private("metrics/merge.py", *METRICS, lambda: resolve("torchmetrics.Metric")),
    "._typehint": Private(
        "config/classes.py",
        "the type of an argument, as jsonargparse has understood it",
        "the annotation of the constructor is taken",
        lambda: resolve("jsonargparse._typehints.ActionTypeHint"),
    ),
    # CPython
    "._actions": Private(
        "config/classes.py",
        "argparse has no public list of its options",
        "AttributeError for every class in a configuration",
        argparse.ArgumentParser,
    ),
    "atexit._run_exitfuncs": Private(
        "launch/fork_server.py",
        "ends a fork as multiprocessing ends one, which calls it too",
        "AttributeError when a worker ends; what programs register with atexit would not run",
    ),
    "ctypes.CDLL": Private(
        "config/pins.py processes/device/allocator.py processes/die_with_parent.py",
        "python has no mallopt and no prctl, and torch no way to ask MKL for its mode",
        "memory is kept as glibc likes, and MKL is taken to be pinned; every Linux has prctl",
        lambda: ctypes,
    ),
    "sys._current_frames": Private(
        "processes/watch/process.py",
        "gives the stack of another thread; python documents it under this name",
        "AttributeError in the report of a stall",
    ),
    "sys._getframe": Private(
        "commands/jobs/refused_exit.py",
        "looks up the stack without reading files, which inspect.stack does; CPython documents it",
        "AttributeError: another python than CPython may lack it",
    ),
    "threading._shutdown": Private(
        "launch/fork_server.py",
        "as _run_exitfuncs",
        "AttributeError when a worker ends; threads that still run would not be waited for",
    ),
}


def test_every_private_name_of_others_is_listed_with_the_modules_that_use_it() -> None:
    sources = {str(path.relative_to(SRC)): path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")}
    own = set().union(*(defined_names(ast.parse(source)) for source in sources.values()))
    found = {f"{name} in {module}" for module in sources for name in private_uses(sources[module], own)}
    listed = {f"{name} in {module}" for name in PRIVATE for module in PRIVATE[name].modules.split()}
    assert sorted(found - listed) == []
    assert sorted(listed - found) == []


@pytest.mark.parametrize("name", PRIVATE)
def test_what_is_installed_has_it(name: str) -> None:
    assert exists(name, PRIVATE[name].owner)


def test_the_system_has_what_ctypes_calls() -> None:
    of_process = ctypes.CDLL(None)
    assert hasattr(of_process, "mallopt")
    assert hasattr(of_process, "prctl")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    assert hasattr(library, "mkl_serv_cbwr_get") == torch.backends.mkl.is_available()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._foreach_add_(a, b)", {"torch._foreach_add_"}),
        ("from torch import _C as engine\nengine.x()", {"torch._C", "torch._C.x"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import torch._dynamo as d\nd.reset()", {"torch._dynamo", "torch._dynamo.reset"}),
        ("def f():\n    from torch.utils._pytree import x", {"torch.utils._pytree.x"}),
        ("import torch.distributed as dist\ndist.c10d._world.map", {"torch.distributed.c10d._world.map"}),
        ("from torch import nn\nnn.modules._Base", {"torch.nn.modules._Base"}),
        ("import numpy as np\nnp.random._pickle", {"numpy.random._pickle"}),
        ("def f(tensor):\n    return tensor._version", {"._version"}),
        ("def f(a):\n    return a()._b._c.d", {"._b", "._c"}),
        ("x = hasattr(y, '_orig_mod')", {"._orig_mod"}),
        ("import torch.nn\nx = getattr(torch.nn, '_a', None)", {"torch.nn._a"}),
        ("x = 'see torch._dynamo.config.limit.'", {"torch._dynamo.config.limit"}),
        ("class A:\n    def f(self):\n        return self._b", {"._b"}),
        ("import ctypes\nctypes.CDLL(None)", {"ctypes.CDLL"}),
        (
            "import argparse\nclass A(argparse.Action):\n    def _get_kwargs(self): ...",
            {"argparse.Action:_get_kwargs"},
        ),
        (
            "import argparse as a\nclass A(a.ArgumentParser):\n    def f(self):\n        self._actions = 1",
            {"argparse.ArgumentParser:_actions"},
        ),
        # What is public, or ours.
        ('"""Of torch._dynamo."""\nimport torch\ntorch.compile(x)', set()),
        ("import os\nos._exit(0)\nrow._replace(a=1)", set()),
        ("class A:\n    _b = 1\n    def f(self):\n        return self._b", set()),
        ("class A:\n    def f(self):\n        self._b = 1\n        return self._b", set()),
        ("from lanewise.processes.world import _x\n_x.y", set()),
        ("import argparse\nclass A(argparse.Action):\n    def _ours(self): ...", set()),
        ("class A:\n    def f(self):\n        return self._of_another_module", set()),
        ("x = __name__\ny = x.__class__", set()),
    ],
)
def test_the_checker_finds(source: str, expected: set[str]) -> None:
    assert private_uses(source, {"_of_another_module"}) == expected


def test_a_name_that_is_gone_is_found() -> None:
    assert exists("torch._foreach_add_", None)
    assert not exists("torch._foreach_gone_", None)
    assert not exists("torch._gone.module", None)
    assert not exists("argparse.Action:_gone", None)
    assert exists("._buffers", nn.Module)
    assert not exists("._gone", nn.Module)
