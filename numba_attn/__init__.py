"""Exact, resumable decode attention over a paged KV cache, on CPU and CUDA, in Numba.

`paged_attention` is the drop-in call. `AttentionState`, `step_tile`, `merge` and `finalize` are the
same computation, a tile of K/V blocks at a time. `reference` is the specification in float64.
"""

from . import reference
from ._device import available_devices
from ._threads import get_num_threads, set_num_threads
from ._warmup import warmup
from .api import paged_attention, step_tile
from .append import append_kv
from .folding import finalize, merge
from .kv_file import DamagedBlockError, KVFile
from .sources import ArraySource, Source
from .state import AttentionState
from .streamer import Streamer, stream_attention

__version__ = "0.5.0"

__all__ = [
    "ArraySource",
    "AttentionState",
    "DamagedBlockError",
    "KVFile",
    "Source",
    "Streamer",
    "append_kv",
    "available_devices",
    "finalize",
    "get_num_threads",
    "merge",
    "paged_attention",
    "reference",
    "set_num_threads",
    "step_tile",
    "stream_attention",
    "warmup",
]
