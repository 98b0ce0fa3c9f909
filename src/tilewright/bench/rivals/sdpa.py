"""torch's scaled_dot_product_attention, by its own choice or held to FlashAttention-2 or cuDNN.

A program that wants one kernel enters `sdpa_kernel` once, around all its calls. Entering it takes
longer than launching a kernel, so it is a setting of the rival, which the clock leaves out. The
operators below (`aten::_scaled_dot_product_flash_attention`, ...) would need no setting, but nobody
calls them: they return nine results, and what belongs to a user's call (checks, padding, fewer key
heads) happens above them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.bench.rivals import Attention
from tilewright.errors import UnsupportedError

NO_KERNEL = ("No available kernel", "No viable backend")


@contextmanager
def only(backend: Any) -> Iterator[None]:
    """This kernel or none. Why it is none torch tells in warnings, some for each kernel it has."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(backend):
                yield
        except RuntimeError as e:
            if not str(e).startswith(NO_KERNEL):
                raise
            words = [str(one.message).split(" (Triggered")[0] for one in told]
            why = [w for w in words if "runtime disabled" not in w and not w.endswith("because:")]
            raise UnsupportedError(" ".join(why) or str(e)) from e


def attention(*args: Any) -> Callable[[], Any]:
    """It takes (batch, heads, tokens, dim); whoever has tokens before heads gives it views."""
    call = Attention(*args)
    q, k, v = args[:3]
    sdpa = partial(
        F.scaled_dot_product_attention,
        attn_mask=call.bias,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.is_grouped,
    )
    if call.layout == "bhsd":
        return lambda: sdpa(q, k, v)
    return lambda: sdpa(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _plain_only(*args: Any) -> str:
    call = Attention(*args)
    if call.layout == "thd" or call.seq_lens_k is not None:
        return "it takes sequences of one length"
    if call.sinks is not None or call.alibi_slopes is not None or call.softcap:
        return "it has no sinks, no ALiBi and no softcap"
    if call.left >= 0 or call.right > 0:
        return "it has no window"
    if call.is_causal and call.bias is not None:
        return "it takes a bias or a causal mask, not both"
    if call.is_causal and not call.is_square:
        return "its causal mask is for as many queries as keys"
    return ""


CALLS = {"attention": attention}
REFUSES = {"attention": _plain_only}
BINDS = ("attention",)  # a program writes the few arguments it takes as they are
WAYS = {
    "flash": partial(only, SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(only, SDPBackend.CUDNN_ATTENTION),
}
