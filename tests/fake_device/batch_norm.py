"""The kernels of torch's SyncBatchNorm, which torch has for GPUs only, of operations of the device."""

import torch

DEVICE_KEY = "PrivateUse1"


def _per_channel(values: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return values.view(-1, *[1] * (inputs.dim() - 2))


def _dims(inputs: torch.Tensor) -> list[int]:
    return [0, *range(2, inputs.dim())]


def stats(inputs: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and inverse deviation of each channel."""
    variance = inputs.var(_dims(inputs), correction=0)
    return inputs.mean(_dims(inputs)), (variance + eps).rsqrt()


def gather_stats(
    _: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join those of all processes, [processes, channels], and write the running ones."""
    counts = counts.unsqueeze(1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    squares = invstds.pow(-2) - eps + (means - mean).square()
    variance = (squares * counts).sum(0) / count
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
    if running_var is not None:
        running_var.lerp_(variance * count / (count - 1), momentum)
    return mean, (variance + eps).rsqrt()


def element(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    _eps: float,
) -> torch.Tensor:
    """Return the normalised inputs."""
    normed = (inputs - _per_channel(mean, inputs)) * _per_channel(invstd, inputs)
    if weight is not None:
        normed = normed * _per_channel(weight, inputs)
    return normed if bias is None else normed + _per_channel(bias, inputs)


def backward_reduce(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    _weight: torch.Tensor | None,
    *_: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the sums that the gradient of the inputs needs, and the gradients of weight and bias."""
    summed = gradient.sum(_dims(inputs))
    with_inputs = (gradient * (inputs - _per_channel(mean, inputs))).sum(_dims(inputs))
    return summed, with_inputs, with_inputs * invstd, summed.clone()


def backward_element(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    summed: torch.Tensor,
    with_inputs: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the inputs, from sums over all processes."""
    count = counts.sum()
    along = _per_channel(with_inputs * invstd.square() / count, inputs)
    centred = gradient - _per_channel(summed / count, inputs) - (inputs - _per_channel(mean, inputs)) * along
    return centred * _per_channel(invstd if weight is None else invstd * weight, inputs)


def register() -> torch.library.Library:
    """Give them to torch; they stay as long as what this returns."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_stats", stats, DEVICE_KEY)
    library.impl("batch_norm_gather_stats_with_counts", gather_stats, DEVICE_KEY)
    library.impl("batch_norm_elemt", element, DEVICE_KEY)
    library.impl("batch_norm_backward_reduce", backward_reduce, DEVICE_KEY)
    library.impl("batch_norm_backward_elemt", backward_element, DEVICE_KEY)
    return library
