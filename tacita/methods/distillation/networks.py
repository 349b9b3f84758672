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
from tacita.kernels.hashing import draw_uniforms

if TYPE_CHECKING:
    from torch import Tensor

Layers: TypeAlias = "dict[str, Tensor]"
_MEAN_DECAY = 0.9
_SQUARE_DECAY = 0.999
_EPS = 1e-8


def init_network(sizes: tuple[int, ...], key: np.uint64) -> Arrays:
    """Weights and biases uniform within 1 / sqrt(inputs), the last bias 0; no step taken."""
    net: Arrays = {}
    for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
        owner = np.array([layer], np.uint64)
        n_numbers = (n_in + 1) * n_out
        draws = draw_uniforms(key, owner, n_numbers)[0]
        unit = draws.reshape(n_in + 1, n_out)
        centred = 2 * unit - 1
        numbers = centred / np.sqrt(n_in)
        numbers = numbers.astype(np.float32)
        weights = numbers[:-1]
        net[f"w{layer}"] = weights.copy()
        biases = numbers[-1]
        net[f"b{layer}"] = biases.copy()
    last_layer = len(sizes) - 2
    net[f"b{last_layer}"][:] = 0
    for name in list(net):
        net[f"mean.{name}"] = np.zeros_like(net[name])
        net[f"square.{name}"] = np.zeros_like(net[name])
    net["steps"] = np.zeros(1, np.int64)
    return net


def list_layer_names(net: Arrays) -> list[str]:
    """Names of weights and biases, without the optimiser's arrays."""
    names = []
    for name in net:
        if name[0] in "wb" and name[1:].isdigit():
            names.append(name)
    return names


def to_tensors(net: Arrays) -> Layers:
    """Copies of weights and biases that a gradient can be taken of."""
    import torch

    layers = {}
    for name in list_layer_names(net):
        copied = net[name].copy()
        tensor = torch.from_numpy(copied)
        layers[name] = tensor.requires_grad_()
    return layers


def run_network(layers: Layers, x: Tensor) -> Tensor:
    """One number per row of x; ReLU between the layers."""
    import torch

    last = len(layers) // 2 - 1
    for layer in range(last):
        product = x @ layers[f"w{layer}"]
        bias = layers[f"b{layer}"]
        x = torch.relu(product + bias)
    product = x @ layers[f"w{last}"]
    bias = layers[f"b{last}"]
    out = product + bias
    return out[..., 0]


def run_network_without_gradient(net: Arrays, x: AnyArray) -> Tensor:
    """The network's answer without a gradient."""
    import torch

    array = np.ascontiguousarray(x, np.float32)
    inputs = torch.from_numpy(array)
    with use_single_thread(), torch.no_grad():
        return run_network(to_tensors(net), inputs)


def take_adam_step(net: Arrays, loss: Callable[[Layers], Tensor], lr: float, clip_norm: float) -> Arrays:
    """The network after one step of Adam on the loss, its gradient cut to a norm."""
    import torch

    layers = to_tensors(net)
    with use_single_thread():
        parameters = list(layers.values())
        value = loss(layers)
        slopes = torch.autograd.grad(value, parameters)
    factor = _compute_clip_factor(slopes, clip_norm)
    steps = net["steps"] + 1
    mean_correction = float(1 - _MEAN_DECAY ** steps[0])
    square_correction = float(1 - _SQUARE_DECAY ** steps[0])
    updated: Arrays = {**net, "steps": steps}
    for name, slope in zip(layers, slopes, strict=True):
        gradient = slope.numpy() * factor
        old_mean = net[f"mean.{name}"]
        mean = 0.9 * old_mean + 0.1 * gradient
        old_square = net[f"square.{name}"]
        squared_gradient = 0.001 * gradient * gradient
        square = 0.999 * old_square + squared_gradient
        root = np.sqrt(square_correction)
        square_root = np.sqrt(square)
        deviation = square_root / root + _EPS
        rate = lr / mean_correction
        step = rate * mean / deviation
        moved = net[name] - step
        updated[name] = np.asarray(moved, np.float32)
        updated[f"mean.{name}"] = np.asarray(mean, np.float32)
        updated[f"square.{name}"] = np.asarray(square, np.float32)
    return updated


def _compute_clip_factor(slopes: tuple[Tensor, ...], clip_norm: float) -> np.float32:
    """What gradients are multiplied by so that their common norm is `clip_norm` at most."""
    import torch

    squares = [(slope.double() ** 2).sum() for slope in slopes]
    norm = float(torch.sqrt(sum(squares)))  # type: ignore[arg-type]
    factor = clip_norm / (norm + 1e-6)
    return np.float32(min(1.0, factor))


def select_network(agent: Arrays, name: str) -> Arrays:
    """One of several networks that share a dict, under names without its prefix."""
    prefix = f"{name}."
    net: Arrays = {}
    for key, value in agent.items():
        if key.startswith(prefix):
            net[key.removeprefix(prefix)] = value
    return net


def bundle_networks(**nets: Arrays) -> Arrays:
    """Several networks in one dict, each with a prefix."""
    agent: Arrays = {}
    for name, net in nets.items():
        for key, value in net.items():
            agent[f"{name}.{key}"] = value
    return agent


@contextmanager
def use_single_thread() -> Iterator[None]:
    """The same sums in the same order, whatever the number of threads outside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
