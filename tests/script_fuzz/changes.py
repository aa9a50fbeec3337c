"""What scripts do by hand, by the names in `plan.DEEDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from tests.script_fuzz.plan import Deed

if TYPE_CHECKING:
    from tests.script_fuzz.script import Script

_CLAMP: Final = 0.05
"""What parameters are clamped to; most initial values are larger."""


def do(deed: Deed, script: Script) -> None:
    """Do what a deed says, on all ranks alike."""
    action = _ACTIONS.get(deed.kind)
    if action is not None:  # the script itself does the rest
        with torch.no_grad():
            action(script, deed)


def register(script: Script, *, after_protect: bool) -> None:
    """Register the hooks of the script's optimizer, before or after `protect`."""
    for deed in script.plan.deeds:
        if deed.kind in _HOOKS and deed.target % 2 == after_protect:
            _HOOKS[deed.kind](script, deed)


def _register_clamp(script: Script, deed: Deed) -> None:
    def clamp(*_: Any) -> None:
        if script.turn == deed.turn:
            with torch.no_grad():
                _clamp(script, deed)

    script.optimizer.register_step_post_hook(clamp)


def _register_scale(script: Script, deed: Deed) -> None:
    def scale(*_: Any) -> None:
        if script.turn == deed.turn:
            _scale_gradients(script, deed)

    script.optimizer.register_step_pre_hook(scale)


_HOOKS: Final[Mapping[str, Callable[[Any, Deed], None]]] = {
    "hook-clamp": _register_clamp,
    "hook-scale": _register_scale,
}


def _trained(script: Script) -> list[nn.Parameter]:
    return [p for p in script.model.parameters() if p.requires_grad and p.numel()]


def _parameter_of(script: Script, deed: Deed) -> nn.Parameter:
    """Return the parameter that a deed selects."""
    trained = _trained(script)
    return trained[deed.target % len(trained)]


def _random(deed: Deed, like: torch.Tensor) -> torch.Tensor:
    """Return random values, the same on each rank and in each start, and leave the script's generators."""
    generator = torch.Generator().manual_seed(1000 * deed.turn + deed.target)
    return torch.randn(like.shape, generator=generator).to(like.dtype) * 0.1


def _step_by_hand(script: Script, deed: Deed) -> None:
    for parameter in _trained(script):
        if parameter.grad is not None:
            parameter.sub_(0.01 * parameter.grad.to_dense())


def _clamp(script: Script, deed: Deed) -> None:
    for parameter in _trained(script):
        parameter.clamp_(-_CLAMP, _CLAMP)


def _draw_again(script: Script, deed: Deed) -> None:
    parameter = _parameter_of(script, deed)
    parameter.copy_(_random(deed, parameter))


def _change_element(script: Script, deed: Deed) -> None:
    _parameter_of(script, deed).view(-1)[-1] += 0.5


def _change_data(script: Script, deed: Deed) -> None:
    _parameter_of(script, deed).data.mul_(0.9)


def _load_smaller(script: Script, deed: Deed) -> None:
    state = dict(script.model.state_dict())
    for name, parameter in script.model.named_parameters():
        if parameter.requires_grad and name in state:
            state[name] = state[name] * 0.9
    script.model.load_state_dict(state)


def _swap(script: Script, deed: Deed) -> None:
    """Validate with other parameters, and bring the same bits back."""
    values = [parameter.detach().clone() for parameter in _trained(script)]
    for parameter in _trained(script):
        parameter.mul_(0.5)
    script.evaluate(deed.turn)
    for parameter, value in zip(_trained(script), values, strict=True):
        parameter.copy_(value)


def _exchange(script: Script, deed: Deed) -> None:
    """Validate with other tensors as the parameters' data, and bring the same tensors back."""
    values = [parameter.data for parameter in _trained(script)]
    for parameter in _trained(script):
        parameter.data = parameter.data * 0.5
    script.evaluate(deed.turn)
    for parameter, value in zip(_trained(script), values, strict=True):
        parameter.data = value


def _replace(script: Script, deed: Deed) -> None:
    script.model.last.weight = nn.Parameter(script.model.last.weight * 0.9)


def _move(script: Script, deed: Deed) -> None:
    parameter = _parameter_of(script, deed)
    parameter.data = parameter.data.clone()


def _load_own(script: Script, deed: Deed) -> None:
    script.model.load_state_dict(script.model.state_dict(), strict=False)


def _write_frozen(script: Script, deed: Deed) -> None:
    script.model.frozen.add_(0.25)


def _scale_gradients(script: Script, deed: Deed) -> None:
    for parameter in _trained(script):
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _add_noise(script: Script, deed: Deed) -> None:
    for parameter in _trained(script):
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.add_(_random(deed, parameter))


def _change_gradient(script: Script, deed: Deed) -> None:
    gradient = _parameter_of(script, deed).grad
    if gradient is not None and not gradient.is_sparse:
        gradient.view(-1)[0] += 0.5


def _drop_gradient(script: Script, deed: Deed) -> None:
    _parameter_of(script, deed).grad = None


def _write_buffer(script: Script, deed: Deed) -> None:
    buffers = list(script.model.buffers())
    if buffers:
        buffers[deed.target % len(buffers)].add_(1)


def _freeze(script: Script, deed: Deed) -> None:
    _parameter_of(script, deed).requires_grad_(False)


def _unfreeze(script: Script, deed: Deed) -> None:
    script.model.frozen.requires_grad_(True)


def _set_rate(script: Script, deed: Deed) -> None:
    for group in script.optimizer.param_groups:
        group["lr"] *= 0.7


def _set_momentum(script: Script, deed: Deed) -> None:
    for group in script.optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (0.8, 0.99)
        elif group["momentum"]:
            group["momentum"] = 0.8


def _replace_optimizer(script: Script, deed: Deed) -> None:
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.01, momentum=0.5)


def _reload_optimizer(script: Script, deed: Deed) -> None:
    script.optimizer.load_state_dict(script.optimizer.state_dict())


def _add_group(script: Script, deed: Deed) -> None:
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def _remove_group(script: Script, deed: Deed) -> None:
    if len(script.optimizer.param_groups) > 1:
        script.optimizer.param_groups.pop()


def _clear_state(script: Script, deed: Deed) -> None:
    script.optimizer.state.clear()


def _change_state(script: Script, deed: Deed) -> None:
    entries = script.optimizer.state.get(_parameter_of(script, deed), {})
    for name in ("momentum_buffer", "exp_avg"):
        if entries.get(name) is not None:
            entries[name].mul_(0.5)


@torch.enable_grad()
def _run_backward_again(script: Script, deed: Deed) -> None:
    script.backward(script.forward(deed.turn))


@torch.enable_grad()
def _step_again(script: Script, deed: Deed) -> None:
    script.optimizer.zero_grad()
    script.backward(script.forward(deed.turn))
    if script.scaler is not None:
        script.scaler.step(script.optimizer)
        script.scaler.update()
    else:
        script.optimizer.step()


@torch.enable_grad()
def _discard_forward(script: Script, deed: Deed) -> None:
    script.forward(deed.turn)


_ACTIONS: Final[Mapping[str, Callable[[Any, Deed], None]]] = {
    "param-step": _step_by_hand,
    "param-clamp": _clamp,
    "param-reinit": _draw_again,
    "param-element": _change_element,
    "param-data": _change_data,
    "param-load": _load_smaller,
    "param-swap": _swap,
    "param-exchange": _exchange,
    "param-replaced": _replace,
    "param-moved": _move,
    "param-reloaded": _load_own,
    "frozen-write": _write_frozen,
    "grad-scale": _scale_gradients,
    "grad-noise": _add_noise,
    "grad-one": _change_gradient,
    "grad-dropped": _drop_gradient,
    "buffer-write": _write_buffer,
    "freeze": _freeze,
    "unfreeze": _unfreeze,
    "rate-set": _set_rate,
    "momentum-set": _set_momentum,
    "optimizer-replaced": _replace_optimizer,
    "optimizer-reloaded": _reload_optimizer,
    "group-added": _add_group,
    "group-removed": _remove_group,
    "state-cleared": _clear_state,
    "state-entry": _change_state,
    "backward-second": _run_backward_again,
    "step-second": _step_again,
    "forward-discarded": _discard_forward,
    "forward-evaluating": lambda script, deed: script.evaluate(deed.turn, wrapped=bool(deed.target % 2)),
}
