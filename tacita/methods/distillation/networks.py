"""Small networks of the agents as dicts of arrays: a value that is saved, restored and continued bit for bit.

Names: w0, b0, w1, b1 ... the layers; mean.* and square.* Adam's moments; steps how many were taken.
torch is loaded by the functions that use it: it takes two seconds, which most commands do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tacita.core.types import AnyArray, Arrays
from tacita.kernels.hashing import uniforms

if TYPE_CHECKING:
    from torch import Tensor

Layers: TypeAlias = "dict[str, Tensor]"
_DECAYS = (0.9, 0.999)
_EPS = 1e-8


def init_network(sizes: tuple[int, ...], key: np.uint64) -> Arrays:
    """Weights and biases uniform within 1 / sqrt(inputs), the last bias 0; no step taken."""
    net: Arrays = {}
    for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
        drawn = uniforms(key, np.array([layer], np.uint64), (n_in + 1) * n_out)[0].reshape(n_in + 1, n_out)
        numbers = ((2 * drawn - 1) / np.sqrt(n_in)).astype(np.float32)
        net[f"w{layer}"], net[f"b{layer}"] = numbers[:-1].copy(), numbers[-1].copy()
    net[f"b{len(sizes) - 2}"][:] = 0
    for name in list(net):
        net[f"mean.{name}"], net[f"square.{name}"] = np.zeros_like(net[name]), np.zeros_like(net[name])
    return {**net, "steps": np.zeros(1, np.int64)}


def layer_names(net: Arrays) -> list[str]:
    return [name for name in net if name[0] in "wb" and name[1:].isdigit()]


def to_tensors(net: Arrays) -> Layers:
    import torch

    return {name: torch.from_numpy(net[name].copy()).requires_grad_() for name in layer_names(net)}


def forward(layers: Layers, x: Tensor) -> Tensor:
    """One number per row of x; ReLU between the layers."""
    import torch

    last = len(layers) // 2 - 1
    for k in range(last):
        x = torch.relu(x @ layers[f"w{k}"] + layers[f"b{k}"])
    return (x @ layers[f"w{last}"] + layers[f"b{last}"])[..., 0]


def predict_values(net: Arrays, x: AnyArray) -> Tensor:
    """The network's answer without a gradient."""
    import torch

    with one_thread(), torch.no_grad():
        return forward(to_tensors(net), torch.from_numpy(np.ascontiguousarray(x, np.float32)))


def take_adam_step(net: Arrays, loss: Callable[[Layers], Tensor], lr: float, clip_norm: float) -> Arrays:
    """The network after one step of Adam on the loss, its gradient cut to a norm."""
    import torch

    layers = to_tensors(net)
    with one_thread():
        slopes = torch.autograd.grad(loss(layers), list(layers.values()))
    norm = float(torch.sqrt(sum((slope.double() ** 2).sum() for slope in slopes)))  # type: ignore[arg-type]
    factor = np.float32(min(1.0, clip_norm / (norm + 1e-6)))
    steps = net["steps"] + 1
    first, second = (float(1 - decay ** steps[0]) for decay in _DECAYS)
    out: Arrays = {**net, "steps": steps}
    for name, slope in zip(layers, slopes, strict=True):
        grad = slope.numpy() * factor
        mean = 0.9 * net[f"mean.{name}"] + 0.1 * grad
        square = 0.999 * net[f"square.{name}"] + 0.001 * grad * grad
        moved = lr / first * mean / (np.sqrt(square) / np.sqrt(second) + _EPS)
        out[name], out[f"mean.{name}"], out[f"square.{name}"] = (
            np.asarray(x, np.float32) for x in (net[name] - moved, mean, square)
        )
    return out


def select_network(agent: Arrays, name: str) -> Arrays:
    """One of several networks that share a dict, under names without its prefix."""
    return {key.removeprefix(f"{name}."): value for key, value in agent.items() if key.startswith(f"{name}.")}


def bundle_networks(**nets: Arrays) -> Arrays:
    return {f"{name}.{key}": value for name, net in nets.items() for key, value in net.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """The same sums in the same order, whatever the number of threads outside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
