"""The CUDA twin as a backend of the tests, on arrays of one library, on both kernels at once."""

import copy

import ml_dtypes
import numpy as np
from _backends import Backend
from _device_report import Missing

import numba_attn
from numba_attn import _arrays, _device

KERNELS = "simple", "split"
LIBRARIES = "numba", "cupy", "torch"


def placer(library):
    """Return the function that puts a host array on the device, as an array of a library.

    Raises
    ------
    Missing
        If the library is not here, or has no device.
    """
    if library == "numba":
        return _device.cuda().to_device
    if _device.is_simulator():
        raise Missing("the simulator has Numba's arrays only")
    try:
        return {"cupy": _cupy, "torch": _torch}[library]()
    except ImportError as error:
        raise Missing(f"{library} cannot be imported ({error})") from error


def _cupy():
    import cupy

    return cupy.asarray


def _torch():
    import torch

    if not torch.cuda.is_available():
        raise Missing("torch sees no CUDA device")

    def place(array):
        if array.dtype != np.uint16:
            return torch.from_numpy(array.copy()).cuda()
        return unsigned(torch.from_numpy(array.view(np.int16).copy()).cuda())

    return place


def unsigned(tensor):
    """View 16-bit integers as uint16, which not every torch has, or not for other libraries."""
    import torch

    try:
        view = tensor.view(torch.uint16)
        _ = view.__cuda_array_interface__
    except Exception:  # whatever a torch without it raises
        return Bits(tensor, "<u2")
    return view


class Bits:
    """An array on the device under another type string of the same size."""

    def __init__(self, array, typestr):
        self._array, self._typestr = array, typestr
        self.shape, self.dtype = tuple(array.shape), np.dtype(typestr)

    @property
    def __cuda_array_interface__(self):
        return dict(self._array.__cuda_array_interface__, typestr=self._typestr)


class BothKernels(Backend):
    """The CUDA twin: each call runs on `simple` and `split`, which must give the same bits.

    Parameters
    ----------
    library : {"numba", "cupy", "torch", "host"}
        Whose arrays are passed; "host" leaves it to the twin to copy them over.
    """

    def __init__(self, library):
        super().__init__("cuda", numba_attn, device="cuda")
        self._place = None if library == "host" else placer(library)
        self.step_tile = self._step_tile

    def _placed(self, x):
        if self._place is None or not isinstance(x, np.ndarray) or x.ndim == 0:
            return x
        if x.dtype == ml_dtypes.bfloat16:
            x = x.view(np.uint16)
        elif x.dtype.kind in "iu" and x.dtype.itemsize > 2:
            x = x.astype(np.int32)
        return self._place(np.ascontiguousarray(x))

    def _given(self, args, options):
        options = {name: self._placed(x) for name, x in options.items()}
        return [self._placed(x) for x in args], options

    def paged_attention(self, q, *args, return_lse=False, **options):
        """Return host arrays, in q's dtype."""
        given, options = self._given((q, *args), options)
        answers = []
        for kernel in KERNELS:
            out, lse = numba_attn.paged_attention(
                *given, **options, return_lse=True, kernel=kernel, device="cuda"
            )
            answers.append((_arrays.to_host(out).view(q.dtype), _arrays.to_host(lse)))
        assert_same_numbers(*zip(*answers, strict=True))
        return answers[0] if return_lse else answers[0][0]

    def _step_tile(self, state, *args, **options):
        given, options = self._given(args, options)
        other = copy.deepcopy(state)
        for one, kernel in zip((other, state), KERNELS, strict=True):
            numba_attn.step_tile(one, *given, **options, kernel=kernel)
        assert_same_numbers(tuple(map(_arrays.to_host, (other.buffer, state.buffer))))


def assert_same_numbers(*pairs):
    """Assert that arrays are equal bit for bit, but for the bits of a NaN."""
    for a, b in pairs:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        bits = [x.view(f"u{x.itemsize}") for x in (a, b)]
        different = (bits[0] != bits[1]) & ~((a != a) & (b != b))
        assert not different.any(), (
            f"simple and split differ in {different.sum()} of {a.size} numbers, first at "
            f"{np.argwhere(different)[0]}: {a[different][0]} and {b[different][0]}"
        )
