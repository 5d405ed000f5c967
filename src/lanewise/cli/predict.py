"""`lanewise predict CONFIG_OR_RUN --output FILE`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.cli.evaluate import DRY_RUN, RUN_OR_MODEL, TRUST, WEIGHTS
from lanewise.errors import ConfigError, TaskError
from lanewise.runs.file import dump_json, replacing

_OUTPUT = Argument("--output", "what to write, a file that ends in .jsonl or .safetensors", "FILE", read_path)
_DATASET = Argument[str | None](
    "--dataset", "name of the eval dataset; may be left out where there is one", "NAME", default=None
)


def predict(arguments: Arguments) -> int:
    """Compute what a model predicts for each sample of a dataset, and write it to a file."""
    output = arguments[_OUTPUT]
    if output.suffix not in _WRITERS:
        raise ConfigError(f"--output must end in {' or '.join(_WRITERS)}: got {output}.")
    if not output.absolute().parent.is_dir():
        raise ConfigError(
            f"--output {output} is in no folder that is there. Make {output.absolute().parent}."
        )

    from lanewise.commands.jobs.evaluate import evaluate_job
    from lanewise.commands.jobs.start import run_command

    job = evaluate_job(
        arguments[RUN_OR_MODEL],
        arguments.overrides,
        trust=arguments[TRUST],
        weights=arguments[WEIGHTS],
        predicts=True,
        dataset=arguments[_DATASET],
    )
    run_command(job, partial(_show, output, job.model_file), is_dry=arguments[DRY_RUN])
    return 0


def _show(path: Path, model_file: Path, result: Mapping[str, Any]) -> None:
    """Write predictions to a file, and say of what they are."""
    write(result["outputs"], path)
    print(f"{path}: {len(result['outputs']):,} samples of {result['dataset']}, by {model_file}")


def write(predictions: Sequence[Any], path: Path) -> None:
    """Write predictions to a file, in the form that its name's ending says."""
    from lanewise.processes.device.nested import plain

    _WRITERS[path.suffix](list(map(plain, predictions)), path)


def _write_lines(predictions: Sequence[Any], path: Path) -> None:
    with replacing(path) as new, new.open("x", encoding="utf-8") as file:
        for prediction in predictions:
            file.write(dump_json(_to_json(prediction)) + "\n")


def _to_json(value: Any) -> Any:
    """Return numbers in dicts and lists for tensors in them."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_to_json, value))
    if isinstance(value, complex):
        raise TaskError("JSON has no complex numbers. Use an --output that ends in .safetensors.")
    return _to_json(value.tolist()) if hasattr(value, "tolist") else value


def _write_tensors(predictions: Sequence[Any], path: Path) -> None:
    import torch

    from lanewise.runs.checkpoint.model_file import save_tensors

    of_samples = [dict(_named_tensors(prediction)) for prediction in predictions]
    stacked = {}
    for name in of_samples[0] if of_samples else ():
        shapes = {tuple(sample[name].shape) if name in sample else None for sample in of_samples}
        if len(shapes) > 1 or any(sample.keys() != of_samples[0].keys() for sample in of_samples):
            raise TaskError(
                f"the predictions called {name} differ in shape between samples, so they make no tensor. "
                "Use an --output that ends in .jsonl, or let Task.predict pad them."
            )
        stacked[name] = torch.stack([sample[name] for sample in of_samples])
    save_tensors(stacked, path)


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a prediction under the keys that lead to them; `predictions` if it is one.

    Raises:
        TaskError: if there is anything else in it.
    """
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _named_tensors(inner, f"{name}.{key}" if name else str(key))
    elif hasattr(value, "shape"):
        yield name or "predictions", value
    elif value is not None:
        raise TaskError(
            f"the predictions called {name or 'predictions'} are of type {type(value).__name__}, and "
            ".safetensors holds tensors only. Use an --output that ends in .jsonl, or let Task.predict leave "
            "them out."
        )


_WRITERS: dict[str, Callable[[Sequence[Any], Path], None]] = {
    ".jsonl": _write_lines,
    ".safetensors": _write_tensors,
}

COMMAND = Command(
    name="predict",
    text="""\
Computes what a model predicts for each sample of an eval dataset, and writes it to FILE in the dataset's
order: a line of JSON for each sample, or tensors whose first dimension is the samples. Task.predict chooses
what is written; by default it is what forward returns. The file is the same on any number of devices:

  lanewise predict runs/mnist --output digits.jsonl
  lanewise predict mnist.yaml --weights model.safetensors --dataset test --output digits.safetensors""",
    run=predict,
    operands=(RUN_OR_MODEL,),
    options=(_OUTPUT, _DATASET, WEIGHTS, TRUST, DRY_RUN),
    has_overrides=True,
)
