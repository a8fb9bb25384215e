"""What Numba's CUDA simulator lacks; imported only inside it.

There, a CUDA thread is a Python thread, made anew for each block, and a block's main thread polls
the others: that is most of the time. Here a few workers stay and take on one CUDA thread after the
other. One of a block's threads runs at a time, until it has to wait for others or ends; then the
next that need not wait goes on, or begins. So threads run in order, which is the worst case for a
missing barrier: the first one runs ahead of all, or the last one where `ORDER` says so. Shared
memory starts as NaN, and the lanes of a warp can meet.
"""

import collections
import os
import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel, kernelapi

WARP = 32

ORDER = 1
"""Of a block's threads: 1, or -1 for the last one first; some faults show in one of them only."""


class _Meeting:
    """A barrier for the threads that have not ended."""

    def __init__(self, block, members):
        self._block = block
        self._members = members
        self._asleep = []

    def wait(self):
        """Sleep until every member has come."""
        worker = threading.current_thread()
        self._asleep.append(worker)
        self._wake()
        self._block.sleep(worker)

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
        self.function, self._points = function, list(np.ndindex(*block_dim))
        self.grid_dim, self.block_dim = kernelapi.Dim3(*grid_dim), kernelapi.Dim3(*block_dim)
        self.meeting = _Meeting(self, len(self._points))
        self.warps = [_Warp(self) for _ in range(0, len(self._points), WARP)]
        self.shared = kernelapi.FakeCUDAShared(0)
        self.ready = collections.deque()  # workers that may go on; places of threads to begin
        self.failed, self.errors = False, []
        self._asleep = {}  # workers that wait, in the order in which they began to
        self._left = len(self._points)  # threads that have not ended
        self._ended = _held_lock()

    def run(self, grid_point, *args):
        """Run all threads to their end, or to the first error."""
        self.block_point, self.args = kernelapi.Dim3(*grid_point), args
        self.ready.extend(range(self._left)[::ORDER])
        self.hand_over()
        self._ended.acquire()
        if self.errors:
            error, traceback = self.errors[0]
            raise error.with_traceback(traceback)

    def hand_over(self):
        """Let the next thread go on, or begin; where all wait for others, let them fail."""
        if not self.ready and self._left:
            self.fail()
        if not self.ready:
            self._ended.release()
        elif isinstance(self.ready[0], int):
            place = self.ready.popleft()
            _idle_worker().begin(self, place, self._points[place])
        else:
            self.ready.popleft().turn.release()

    def sleep(self, worker):
        """Let others run until it is this thread's turn."""
        self._asleep[worker] = None
        self.hand_over()
        worker.turn.acquire()
        del self._asleep[worker]
        if self.failed:
            raise RuntimeError("another thread of the block failed, or never came")

    def end(self, place):
        """Take a thread for ended, and let the next one run."""
        self._left -= 1
        self.warps[place // WARP].meeting.leave()
        self.meeting.leave()
        self.hand_over()

    def fail(self):
        """Let all threads that wait fail; those that have not begun never do."""
        if not self.failed:
            self.failed = True
            self._left -= sum(isinstance(one, int) for one in self.ready)
            self.ready = collections.deque(self._asleep)


class _Worker(threading.Thread):
    """Runs CUDA threads, one after the other; has the names that the simulator looks for."""

    def __init__(self):
        super().__init__(daemon=True)
        self.turn = _held_lock()  # but for its turns
        self.start()

    def begin(self, block, place, point):
        """Take on a thread of a block."""
        self.block, self.thread_id, self.copies = block, place, [[]]
        self.blockIdx, self.threadIdx = block.block_point, kernelapi.Dim3(*point)
        self.turn.release()

    def run(self):
        while True:
            self.turn.acquire()
            block, place = self.block, self.thread_id
            try:
                block.function(*block.args)
            except Exception as error:
                where = f"tid={list(self.threadIdx)} ctaid={list(self.blockIdx)}"
                block.errors.append((type(error)(f"{where}: {error}"), error.__traceback__))
                block.fail()
            self.block = None
            _idle.append(self)
            block.end(place)

    def syncthreads(self):
        self.block.meeting.wait()


_idle = []  # workers
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)


def _idle_worker():
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


def _held_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Cuda:
    """Stands in for ``numba.cuda`` in functions that kernels call.

    The simulator itself does so only in the module of the kernel.
    """

    syncthreads = staticmethod(lambda: threading.current_thread().syncthreads())
    shared = property(lambda self: threading.current_thread().block.shared)
    threadIdx = property(lambda self: threading.current_thread().threadIdx)
    blockIdx = property(lambda self: threading.current_thread().blockIdx)
    blockDim = property(lambda self: threading.current_thread().block.block_dim)
    gridDim = property(lambda self: threading.current_thread().block.grid_dim)


function_cuda = _Cuda()


def begun_copies():
    """Return the groups of copies that the calling thread has begun, the last one still open."""
    return threading.current_thread().copies


def lane_of_thread():
    """Return the calling thread's place in its warp."""
    return threading.current_thread().thread_id % WARP


def exchange(x):
    """Return what each lane of the calling thread's warp has brought."""
    worker = threading.current_thread()
    warp, lane = worker.block.warps[worker.thread_id // WARP], worker.thread_id % WARP
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
