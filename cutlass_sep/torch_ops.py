"""torch.library: the operators of torch.ops.cutlass_sep, their fake kernels, gradients and autocast rules.

Options arrive resolved: padding as (top, bottom, left, right), stride and dilation as pairs. x is batched.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from . import dispatch
from .operators import BLOCK1D, OPERATORS, SEPARABLE2D, Operator, lowered
from .problem import layout_of, strides_of


def _any_requires_grad(*values) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


#: Whether one of the arguments is a tensor that requires a gradient. Early versions of PyTorch have no function for it.
any_requires_grad = getattr(torch._C, "_any_requires_grad", _any_requires_grad)

# y's layout follows x's, so a compiler must not hand over x with other strides than it traced.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

library = torch.library.Library("cutlass_sep", "DEF")


class TorchOp:
    """An operator in torch.library, made by registering it: overloads `forward` and, named *_backward, `backward`.

    `backward` returns the gradients that `needed` marks, in the order of the tensors.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator, self.count = operator, len(operator.tensors)
        name = operator.name
        tensors = (f"Tensor{'?' if tensor.endswith('bias') else ''} {tensor}" for tensor in operator.tensors)
        parameters = ", ".join((*tensors, operator.schema))
        library.define(f"{name}({parameters}) -> Tensor", tags=_TAGS)
        library.define(f"{name}_backward(Tensor grad, {parameters}, bool[{self.count}] needed) -> Tensor[]", tags=_TAGS)
        self.forward = getattr(torch.ops.cutlass_sep, name).default
        self.backward = getattr(torch.ops.cutlass_sep, f"{name}_backward").default

        library.impl(name, self._forward, "CompositeExplicitAutograd")
        library.impl(name, self._autograd, "Autograd", with_keyset=True)
        library.impl(f"{name}_backward", self._backward, "CompositeExplicitAutograd")
        # Of torch.autograd.grad(is_grads_batched=True); its fallback takes no operator that gives a list.
        library.impl(f"{name}_backward", self._backward, "Batched")
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            library.impl(name, self._autocast(device_type), key)
            library.impl(f"{name}_backward", self._backward_without_autocast, key)
        for overload, fake in ((self.forward, self._forward_fake), (self.backward, self._backward_fake)):
            qualified = overload._schema.name
            torch.library.register_fake(qualified, fake, lib=library)
            torch.library.register_vmap(qualified, _one_by_one(overload), lib=library)

    def _parts(self, args: tuple) -> tuple[tuple, tuple]:
        """Tensors and options of a call, which must be batched."""
        tensors, options = args[: self.count], args[self.count :]
        if tensors[0].dim() != self.operator.batched:
            raise RuntimeError(f"x must be batched: {self.operator.batched}-D, got shape {list(tensors[0].shape)}")
        return tensors, options

    def _forward(self, *args) -> Tensor:
        tensors, options = self._parts(args)
        return dispatch.run(self.operator, tensors, self.operator.restored(options), resolved=True)

    def _forward_fake(self, *args) -> Tensor:
        tensors, options = self._parts(args)
        x, shape = tensors[0], self.operator.y_shape(tensors, options)
        layout = layout_of(x, self.operator.problem.spatial)
        return torch.empty_strided(shape, strides_of(shape, layout), dtype=x.dtype, device=x.device)

    def _backward(self, grad, *args) -> list[Tensor]:
        *args, needed = args
        tensors, options = self._parts(args)
        gradients = self.operator.backward(grad, *tensors, *self.operator.restored(options), tuple(needed))
        return [g for g in gradients if g is not None]

    def _backward_fake(self, grad, *args) -> list[Tensor]:
        return [torch.empty_like(t) for t, wanted in zip(args[: self.count], args[-1], strict=True) if wanted]

    def _autograd(self, keyset, *args) -> Tensor:
        if (torch.is_grad_enabled() and any_requires_grad(*args)) or forward_ad._current_level >= 0:
            return Separable.apply(self, keyset, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.forward.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def _autocast(self, device_type: str):
        """Casts what autocast casts (floating, not float64); the convolutions inside see no autocast any more."""

        def forward(*args) -> Tensor:
            dtype = torch.get_autocast_dtype(device_type)
            tensors, options, added = self.operator.cast(
                *self._parts(args), lambda tensor: lowered(tensor, device_type, dtype)
            )
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
                y = self.forward(*tensors, *options)
                # y comes first: the sum takes its layout.
                return y if added is None else torch.add(y, added).to(added.dtype)

        return forward

    def _backward_without_autocast(self, *args) -> list[Tensor]:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return self.backward(*args)


class Separable(torch.autograd.Function):
    """The gradient of an operator. Saved tensors carry version counters: an in-place edit raises in backward.

    `keyset` is that of the dispatcher, or None for a call that did not come through it.
    """

    @staticmethod
    def forward(ctx, op: TorchOp, keyset, *args):
        tensors, options = args[: op.count], args[op.count :]
        ctx.save_for_backward(*tensors)
        ctx.op, ctx.options = op, options
        if keyset is None:
            return dispatch.run(op.operator, tensors, options, resolved=True)
        with torch._C._AutoDispatchBelowAutograd():
            return op.forward.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    @staticmethod
    def backward(ctx, grad):
        op = ctx.op
        needed = ctx.needs_input_grad[2 : 2 + op.count]
        args = (grad, *ctx.saved_tensors, *ctx.options, needed)
        if torch.is_grad_enabled() and is_legacy_batchedtensor(grad):
            # What Gradients records is lost when torch stacks the batch.
            raise NotImplementedError(
                f"{op.operator.name} has no second derivative: is_grads_batched without create_graph"
            )
        # Under create_graph autograd must know that the gradients depend on the saved tensors too, or it takes their
        # own derivatives for zero; torch's once_differentiable marks only what depends on `grad`.
        gradients = iter(Gradients.apply(op, *args) if torch.is_grad_enabled() else op.backward(*args))
        return None, None, *(next(gradients) if wanted else None for wanted in needed), *(None for _ in ctx.options)


class TransformedSeparable(torch.autograd.Function):
    """The same in the form that torch.func's transforms (grad, vmap, ...) ask for; it costs more a call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: TorchOp, *args):
        return op.forward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        op, *args = inputs
        ctx.save_for_backward(*args[: op.count])
        ctx.op, ctx.options = op, args[op.count :]

    @staticmethod
    def backward(ctx, grad):
        op = ctx.op
        needed = ctx.needs_input_grad[1 : 1 + op.count]
        gradients = iter(Gradients.apply(op, grad, *ctx.saved_tensors, *ctx.options, needed))
        return None, *(next(gradients) if wanted else None for wanted in needed), *(None for _ in ctx.options)


class Gradients(torch.autograd.Function):
    """Gradients whose own derivative raises: autograd and torch.func would take what is not recorded for zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: TorchOp, *args):
        return tuple(op.backward(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0].operator.name

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{ctx.name} has no second derivative")


def _of_no_element(op, in_dims, args):
    """What vmap returns over a dimension of size 0: `op` is never called, its fake kernel tells the shapes."""
    meta = (
        a.new_empty([*a.shape[:d], *a.shape[d + 1 :]] if isinstance(d, int) else a.shape, device="meta")
        if isinstance(a, Tensor)
        else a
        for a, d in zip(args, in_dims, strict=True)
    )
    device = next(a.device for a in args if isinstance(a, Tensor))
    result = op(*meta)
    if isinstance(result, Tensor):
        return torch.empty((0, *result.shape), dtype=result.dtype, device=device), 0
    return [torch.empty((0, *r.shape), dtype=r.dtype, device=device) for r in result], [0] * len(result)


def _one_by_one(op):
    """Rule of torch.vmap: calls `op` once an element of the mapped dimension."""

    def rule(info, in_dims, *args):
        if info.batch_size == 0:
            return _of_no_element(op, in_dims, args)
        results = [
            op(*(a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return [torch.stack(parts) for parts in zip(*results, strict=True)], [0] * len(results[0])

    return rule


_OPS = {operator: TorchOp(operator) for operator in OPERATORS}
separable2d, block1d = _OPS[SEPARABLE2D], _OPS[BLOCK1D]
