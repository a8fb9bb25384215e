"""Arrays that end, or begin, at memory that cannot be touched; run as a process of its own."""

import ctypes
import mmap
import sys

import _backends
import _cases
import ml_dtypes
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


def check_formats(side):
    """Attend over caches of every format, with scales by token: nothing else is touched."""
    cpu = _backends.get("cpu")
    for name in ("float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"):
        seqs = _cases.draw((17,), head_dim=45)
        keys, values = (
            x[0][:, None].astype(np.float32).astype(np.dtype(getattr(ml_dtypes, name, name)))
            for x in (seqs.keys, seqs.values)
        )  # [tokens, 1, Hkv, D]: blocks of one token
        scales = np.random.default_rng(0).uniform(0.5, 2, (2, *keys.shape[:3])).astype(np.float32)
        table = np.arange(17, dtype=np.int32)[None]
        q = seqs.q.astype(np.float16 if name == "int8" else np.float32)
        arrays = [q, keys, values, table, seqs.lens, *scales]
        answers = []
        for given in (arrays, [guarded(np.ascontiguousarray(x), side) for x in arrays]):
            options = {"k_scale": given[5], "v_scale": given[6], "return_lse": True}
            answers.append(cpu.paged_attention(*given[:5], **options))
        assert_same_bits(*zip(*answers, strict=True))


def check_window(side):
    """Blocks before a window, and table entries, may be past all memory."""
    seqs = _cases.draw((40,))
    paged = _cases.place(seqs, 1, spare=0)
    last = _cases.place(seqs.tokens(33, 40), 1, spare=0)
    pools = [guarded(np.ascontiguousarray(pool), side) for pool in last[:2]]
    table = np.full((1, 40), 2147480000, np.int32)
    table[0, 33:] = last.block_tables[0, :7]
    options = {"sliding_window": 7, "return_lse": True}
    cpu = _backends.get("cpu")
    answer = cpu.paged_attention(seqs.q, *pools, table, seqs.lens, **options)
    assert_same_bits(*zip(answer, cpu.paged_attention(seqs.q, *paged, **options), strict=True))


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
    for edge in ("end", "start"):
        print(f"formats and windows, guarded at the {edge}", flush=True)
        check_formats(edge)
        check_window(edge)
