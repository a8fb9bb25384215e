"""What Numba's CUDA simulator lacks; imported only inside it.

There, a CUDA thread is a Python thread, and a block's main thread polls the others, which costs
most of the time. Here threads sleep until all have come. Shared memory is allocated without a race
and starts as NaN, and the lanes of a warp can meet.
"""

import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel, kernelapi

WARP = 32


class _Meeting:
    """A barrier for the threads that are still running."""

    def __init__(self, members):
        self._members = members
        self._asleep = []
        self._failed = False
        self._lock = threading.Lock()

    def wait(self):
        """Sleep until every member has come."""
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            self._asleep.append(turn)
            self._wake()
        turn.acquire()
        if self._failed:
            raise RuntimeError("another thread of the block failed")

    def leave(self):
        """Come no more."""
        with self._lock:
            self._members -= 1
            self._wake()

    def fail(self):
        """Let every member fail."""
        with self._lock:
            self._failed = True
            self._wake()

    def _wake(self):
        if self._failed or len(self._asleep) == self._members:
            for turn in self._asleep:
                turn.release()
            self._asleep = []


class _Warp:
    """Where the lanes of a warp meet."""

    def __init__(self):
        self.meeting = _Meeting(WARP)
        self.values = [0.0] * WARP, [0.0] * WARP
        self.turns = [0] * WARP


class _Block:
    """Runs the threads of one block; stands in for the simulator's ``BlockManager``."""

    def __init__(self, function, grid_dim, block_dim, debug):
        self._function, self._grid_dim, self._block_dim = function, grid_dim, block_dim
        self._debug = debug
        self.block_state = np.zeros(block_dim, np.bool_)
        threads = int(np.prod(block_dim))
        self.meeting = _Meeting(threads)
        self.warps = [_Warp() for _ in range(0, threads, WARP)]
        self.errors = []

    def run(self, grid_point, *args):
        threads = [
            _Thread(lambda: self._function(*args), self, grid_point, point, self._debug)
            for point in np.ndindex(*self._block_dim)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            error, traceback = self.errors[0]
            raise error.with_traceback(traceback)


class _Thread(kernel.BlockThread):
    def run(self):
        super().run()
        block = self._manager
        if self.exception is not None:
            block.errors.append(self.exception)
            for warp in block.warps:
                warp.meeting.fail()
            block.meeting.fail()
        block.meeting.leave()

    def syncthreads(self):
        self._manager.meeting.wait()


def exchange(x):
    """Return what each lane of the calling thread's warp has brought."""
    thread = threading.current_thread()
    warp, lane = thread._manager.warps[thread.thread_id // WARP], thread.thread_id % WARP
    values = warp.values[warp.turns[lane]]  # two in turn: one meeting per exchange is enough
    warp.turns[lane] ^= 1
    values[lane] = x
    warp.meeting.wait()
    return values


_allocating = threading.Lock()
_dynamic_array = kernelapi.FakeCUDAShared.array


def _shared_array(self, shape, dtype, alignment=None):
    """Allocate a shared array once per line of source, with the bits of a NaN."""
    if shape == 0:
        return _dynamic_array(self, shape, dtype)
    if isinstance(dtype, kernelapi.types.Type):
        dtype = kernelapi.numpy_support.as_dtype(dtype)
    caller = sys._getframe(1)
    line = caller.f_code, caller.f_lineno
    with _allocating:
        if line not in self._allocations:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            poison = np.full(size, 0xFF, np.uint8)
            self._allocations[line] = poison.view(dtype).reshape(shape)
        return self._allocations[line]


kernel.BlockManager = _Block
kernelapi.FakeCUDAShared.array = _shared_array
