"""Batch normalisation by the statistics of all ranks' batches."""

# `forward` and `backward` are torch's.
# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from fanin.horovod.operations import allgather_async, allreduce_async
from fanin.horovod.submission import Sum, synchronize
from fanin.horovod.world import size


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` whose means and variances are those of all ranks' batches together.

    Of tensors on CPUs and GPUs, of shape (N, C, ...). All ranks run it in training, as often; a
    rank whose batch is empty, too.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        self._check_input_dim(input)
        batch = self.training or self.running_mean is None
        if not batch or size() == 1:
            return self._alone(input, batch)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        output, mean, variance, count = _Normalised.apply(input, self.weight, self.bias, self.eps)
        # All ranks' batches may be empty: then there is nothing to learn.
        learns = bool(count.any())
        if learns and self.running_mean is not None and self.running_var is not None:
            momentum = self.momentum
            if momentum is None:
                assert self.num_batches_tracked is not None
                momentum = 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (count / (count - 1.0).clamp_min(1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return output  # type: ignore[no-any-return]

    def _alone(self, batch_input: Tensor, batch: bool) -> Tensor:
        momentum = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return torch.nn.functional.batch_norm(
            batch_input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            batch,
            momentum,
            self.eps,
        )

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"a batch is of shape (N, C, ...), and not {tuple(input.shape)}")


class _Normalised(Function):
    @staticmethod
    def forward(
        ctx: Any, batch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Any:
        axes = [axis for axis in range(batch.dim()) if axis != 1]
        values = _precise(batch)
        if batch.numel():
            variance, mean = torch.var_mean(values, axes, correction=0)
        else:  # they would be NaN, and so would be 0 times them
            variance = mean = values.new_zeros(batch.shape[1])
        count = mean.new_full((1, mean.numel()), batch.numel() / batch.shape[1])
        own = torch.cat([count, mean[None], variance[None]]).double()
        of_all = synchronize(allgather_async(own[None]))
        counts, means, variances = of_all.unbind(1)
        total = counts.sum(0)
        some = total.clamp_min(1.0)
        mean = (counts * means).sum(0) / some
        variance = (counts * (variances + (means - mean).square())).sum(0) / some
        inverse = (variance + eps).rsqrt()
        normal = (values - _wide(mean, values)) * _wide(inverse, values)
        kept = normal.to(batch.dtype)
        ctx.save_for_backward(kept, inverse, weight, total)
        output = normal
        if weight is not None:
            output = output * _wide(weight, values)
        if bias is not None:
            output = output + _wide(bias, values)
        output = output.to(batch.dtype)
        ctx.mark_non_differentiable(mean, variance, total)
        return (output.clone() if output is kept else output), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        normal, inverse, weight, total = ctx.saved_tensors
        axes = [axis for axis in range(gradient.dim()) if axis != 1]
        dtype, gradient, normal = gradient.dtype, _precise(gradient), _precise(normal)
        of_bias = gradient.sum(axes)
        of_weight = (gradient * normal).sum(axes)
        sums = synchronize(allreduce_async(torch.stack([of_bias, of_weight]).double(), op=Sum))
        mean, along = (sums / total).unbind(0)
        scale = inverse if weight is None else inverse * weight
        centred = gradient - _wide(mean, gradient) - normal * _wide(along, gradient)
        of_batch = (centred * _wide(scale, gradient)).to(dtype)
        if weight is None:
            return of_batch, None, None, None
        return of_batch, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None


def _precise(values: Tensor) -> Tensor:
    """Return values in a dtype whose sums can be trusted: float32 for bfloat16 and float16."""
    return values.float() if values.dtype.itemsize < 4 else values


def _wide(of_channels: Tensor, batch: Tensor) -> Tensor:
    """Return one value for each channel in the shape and the dtype that a batch is used in."""
    shape = [1, -1] + [1] * (batch.dim() - 2)
    return of_channels.view(shape).to(batch.dtype)
