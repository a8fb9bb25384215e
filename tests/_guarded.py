"""Arrays that end, or begin, at memory that cannot be touched; run as a process of its own."""

import ctypes
import mmap
import sys

import _backends
import _cases
import numpy as np
from _bound import assert_same_bits, check_answer

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(array, side):
    """Copy an array to the end (or start) of pages between two inaccessible ones."""
    inner = -(-array.nbytes // PAGE) * PAGE
    region = mmap.mmap(-1, inner + 2 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for edge in (base, base + PAGE + inner):
        no_access = 0
        if LIBC.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(PAGE), no_access):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = PAGE + (inner - array.nbytes if side == "end" else 0)
    copy = np.frombuffer(region, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy


def check(head_dim, side):
    """Attend over caches whose last token ends at the edge; every array is guarded."""
    for lens in ((17,), (5, 1, 16), (33, 530)):
        seqs = _cases.draw(lens, head_dim=head_dim)
        paged = _cases.place(seqs, 1, spare=0)
        tables = paged.block_tables[:, : max(lens)]  # the last row is the longest
        arrays = [seqs.q, *paged[:2], tables, paged.seq_lens]
        arrays = [guarded(np.ascontiguousarray(array), side) for array in arrays]
        out = guarded(np.zeros_like(seqs.q), side)
        cpu = _backends.get("cpu")
        answer = cpu.paged_attention(*arrays, out=out, return_lse=True)
        check_answer(seqs, _cases.Answer(*answer))
        assert_same_bits(*zip(answer, _cases.attend(cpu, seqs, paged), strict=True))


def check_contiguous(head_dim, side):
    """Attend over one contiguous cache, filled to its last slot."""
    for tokens in (1, 4, 16, 23):
        seqs = _cases.draw((tokens,), head_dim=head_dim)
        caches = [guarded(x[0][None], side) for x in (seqs.keys, seqs.values)]
        q = guarded(seqs.q, side)
        answer = _backends.get("cpu").paged_attention(q, *caches, None, seqs.lens, return_lse=True)
        check_answer(seqs, _cases.Answer(*answer))


def touch():
    """Touch the guard: the process must die of it, or the guard guards nothing."""
    array = guarded(np.zeros(8, np.uint8), "end")
    print(ctypes.string_at(array.ctypes.data, 9))
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1:] == ["touch"]:
        touch()
    for dim in map(int, sys.argv[1:]):
        for edge in ("end", "start"):
            print(f"head_dim {dim}, guarded at the {edge}", flush=True)
            check(dim, edge)
            check_contiguous(dim, edge)
