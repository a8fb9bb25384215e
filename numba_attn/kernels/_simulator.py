"""What Numba's CUDA simulator lacks; imported only inside it.

There, a CUDA thread is a Python thread, and a block's main thread polls the others, which costs
most of the time. Here one thread of a block runs at a time, until it has to wait for others; then
it wakes the next that need not. So threads run in order, which is the worst case for a missing
barrier: the first one runs ahead of all, or the last one where `ORDER` says so. Shared memory
starts as NaN, and the lanes of a warp can meet.
"""

import collections
import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel, kernelapi

WARP = 32

ORDER = 1
"""Of a block's threads: 1, or -1 for the last one first; some faults show in one of them only."""


class _Meeting:
    """A barrier for the threads that are still running."""

    def __init__(self, block, members):
        self._block = block
        self._members = members
        self._asleep = []

    def wait(self):
        """Sleep until every member has come."""
        thread = threading.current_thread()
        self._asleep.append(thread)
        self._wake()
        self._block.sleep(thread)

    def leave(self):
        """Come no more."""
        self._members -= 1
        self._wake()

    def _wake(self):
        if len(self._asleep) == self._members and not self._block.failed:
            self._block.ready.extend(self._asleep)
            self._asleep.clear()


class _Warp:
    """Where the lanes of a warp meet."""

    def __init__(self, block):
        self.meeting = _Meeting(block, WARP)
        self.values = [0.0] * WARP, [0.0] * WARP
        self.turns = [0] * WARP


class _Block:
    """Runs the threads of one block; stands in for the simulator's ``BlockManager``."""

    def __init__(self, function, grid_dim, block_dim, debug):
        self._function, self._block_dim = function, block_dim
        self.grid_dim, self.block_dim = kernelapi.Dim3(*grid_dim), kernelapi.Dim3(*block_dim)
        self._debug = debug
        self.block_state = np.zeros(block_dim, np.bool_)
        threads = int(np.prod(block_dim))
        self.meeting = _Meeting(self, threads)
        self.warps = [_Warp(self) for _ in range(0, threads, WARP)]
        self.ready = collections.deque()  # threads that need not wait
        self.failed, self.errors = False, []
        self.shared = kernelapi.FakeCUDAShared(0)

    def run(self, grid_point, *args):
        """Run all threads to their end, or to the first error."""
        self._threads = [
            _Thread(lambda: self._function(*args), self, grid_point, point, self._debug)
            for point in np.ndindex(*self._block_dim)
        ]
        self.ready.extend(self._threads[::ORDER])
        for thread in self._threads:
            thread.start()
        self.wake_next()
        for thread in self._threads:
            thread.join()
        if self.errors:
            error, traceback = self.errors[0]
            raise error.with_traceback(traceback)

    def wake_next(self):
        """Let the next thread run; where all wait for others, let them fail."""
        if not self.ready:
            self.fail()
        if self.ready:
            self.ready.popleft().turn.release()

    def sleep(self, thread):
        """Let others run until it is this thread's turn."""
        thread.waits = True
        self.wake_next()
        thread.turn.acquire()
        thread.waits = False
        if self.failed:
            raise RuntimeError("another thread of the block failed, or never came")

    def fail(self):
        """Let all threads that have not ended fail."""
        if not self.failed:
            self.failed = True
            begun = [thread for thread in self._threads if thread.waits]
            others = [thread for thread in self.ready if not thread.waits]
            self.ready = collections.deque(begun + others)


class _Thread(kernel.BlockThread):
    def __init__(self, *args):
        super().__init__(*args)
        self.turn = threading.Lock()  # held unless it is this thread's turn
        self.turn.acquire()
        self.waits = False

    def run(self):
        block = self._manager
        self.turn.acquire()
        if not block.failed:
            super().run()
        if self.exception is not None:
            block.errors.append(self.exception)
            block.fail()
        block.warps[self.thread_id // WARP].meeting.leave()
        block.meeting.leave()
        block.wake_next()

    def syncthreads(self):
        self._manager.meeting.wait()


class _Cuda:
    """Stands in for ``numba.cuda`` in functions that kernels call.

    The simulator itself does so only in the module of the kernel.
    """

    syncthreads = staticmethod(lambda: threading.current_thread().syncthreads())
    shared = property(lambda self: threading.current_thread()._manager.shared)
    threadIdx = property(lambda self: threading.current_thread().threadIdx)
    blockIdx = property(lambda self: threading.current_thread().blockIdx)
    blockDim = property(lambda self: threading.current_thread()._manager.block_dim)
    gridDim = property(lambda self: threading.current_thread()._manager.grid_dim)


function_cuda = _Cuda()


def begun_copies():
    """Return the groups of copies that the calling thread has begun, the last one still open."""
    return threading.current_thread().__dict__.setdefault("_begun_copies", [[]])


def lane_of_thread():
    """Return the calling thread's place in its warp."""
    return threading.current_thread().thread_id % WARP


def exchange(x):
    """Return what each lane of the calling thread's warp has brought."""
    thread = threading.current_thread()
    warp, lane = thread._manager.warps[thread.thread_id // WARP], thread.thread_id % WARP
    values = warp.values[warp.turns[lane]]  # two in turn: one meeting per exchange is enough
    warp.turns[lane] ^= 1
    values[lane] = x
    warp.meeting.wait()
    return values


_dynamic_array = kernelapi.FakeCUDAShared.array


def _shared_array(self, shape, dtype, alignment=None):
    """Allocate a shared array once per line of source, with the bits of a NaN."""
    if shape == 0:
        return _dynamic_array(self, shape, dtype)
    if isinstance(dtype, kernelapi.types.Type):
        dtype = kernelapi.numpy_support.as_dtype(dtype)
    caller = sys._getframe(1)
    line = caller.f_code, caller.f_lineno
    if line not in self._allocations:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        poison = np.full(size, 0xFF, np.uint8)
        self._allocations[line] = poison.view(dtype).reshape(shape)
    return self._allocations[line]


kernel.BlockManager = _Block
kernelapi.FakeCUDAShared.array = _shared_array
