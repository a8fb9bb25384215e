"""One interface over the reference and the twins: host arrays in, host arrays out."""

import functools
import math
from types import ModuleType

import ml_dtypes
import numpy as np

import numba_attn
from numba_attn import _arrays, _device


class Backend:
    """A module with the five public names, on one device.

    `place` is the device argument of `AttentionState` and `paged_attention`, or nothing.
    """

    def __init__(self, name: str, module: ModuleType, *, kernel=None, **place: str) -> None:
        self.name = name
        self.module = module
        self.place = place
        self.kernel = {} if kernel is None else {"kernel": kernel}
        self.step_tile = functools.partial(module.step_tile, **self.kernel)
        self.merge = module.merge

    def __repr__(self) -> str:
        return self.name

    @property
    def tiny(self) -> bool:
        """Whether cases must be tiny: the simulator runs each CUDA thread as a Python thread."""
        return self.name == "cuda" and _device.is_simulator()

    def size(self, full, tiny):
        return tiny if self.tiny else full

    @property
    def split_tokens(self) -> int:
        """Tile boundaries at multiples of this give bit-equal states."""
        return _device.backend(self.name).SPLIT

    def paged_attention(self, *args, **options):
        return self.module.paged_attention(*args, **options, **self.place, **self.kernel)

    def AttentionState(self, *sizes):
        return self.module.AttentionState(*sizes, **self.place)

    def like(self, q, v_pool):
        if self.name == "cuda":  # host arrays would give a host state
            return self.AttentionState(math.prod(q.shape[:-2]), q.shape[-2], v_pool.shape[3])
        return self.module.AttentionState.like(q, v_pool)

    def finalize(self, state, *, return_lse=False, **options):
        out, lse = self.module.finalize(state, return_lse=True, **options)
        out = _arrays.to_host(out)
        if self.name == "cuda" and np.dtype(options.get("dtype", "bfloat16")) == ml_dtypes.bfloat16:
            out = out.view(ml_dtypes.bfloat16)
        return (out, _arrays.to_host(lse)) if return_lse else out

    def read(self, state):
        """Return host copies of m [queries, Hq], l [queries, Hq] and o [queries, Hq, Dv]."""
        return tuple(np.array(_arrays.to_host(part)) for part in (state.m, state.l, state.o))

    def lse(self, state):
        return np.array(_arrays.to_host(state.lse))

    def write(self, state, m, l, o) -> None:
        if self.name == "cuda":
            flat = np.concatenate([np.asarray(x, np.float32).ravel() for x in (m, l, o)])
            _arrays.overwrite(state.buffer, flat)
        else:
            state.m[...], state.l[...], state.o[...] = m, l, o

    def copy(self, state):
        twin = self.AttentionState(*state.o.shape)
        self.write(twin, *self.read(state))
        return twin


@functools.cache
def get(name: str) -> Backend:
    if name == "reference":
        return Backend(name, numba_attn.reference)
    if name == "cuda split":
        return Backend("cuda", numba_attn, kernel="split", device="cuda")
    return Backend(name, numba_attn, device=name)
