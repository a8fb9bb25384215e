"""Decode steps over a KV cache on disk that outgrows memory, as an engine would run them.

    python bench/decode_loop.py

What `then` reads ahead must be on disk by then, but a layer's newest key and value are known only
after the layer before. So the newest block of each sequence, its tail, stays in memory: a state
absorbs it first, then the full blocks on disk. A tail that is full is written, and begun anew.
"""

import argparse
import pathlib
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

import numba_attn

BLOCK, Q_HEADS, KV_HEADS, DIM = 16, 8, 2, 64
BLOCK_BYTES = 2 * BLOCK * KV_HEADS * DIM * 2


def main(arguments=None):
    """Run the loop; return its exit status: 1 when its last step is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 1000, "layers": 4, "seqs": 2, "resident-blocks": 24}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
    parser.add_argument("--every", type=int, default=200, help="steps to a line (default 200)")
    options = parser.parse_args(arguments)
    numba_attn.warmup(Q_HEADS, KV_HEADS, DIM, dtype="float32", kv_dtype="bfloat16")
    sizes = {"num_layers": options.layers, "num_blocks": options.seqs * options.steps // BLOCK + 1}
    sizes |= {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    with (
        tempfile.TemporaryDirectory() as folder,
        numba_attn.KVFile.create(pathlib.Path(folder, "cache"), **sizes) as file,
        numba_attn.Streamer(options.resident_blocks) as streamer,
    ):
        out = decode(file, streamer, options)
    error = np.abs(out - expected(options)).max()
    print(f"last step, last layer: {error:.1e} from the float64 reference")
    return 0 if error <= 1e-5 else 1


def decode(file, streamer, options):
    """Run all steps; return the attention of the last one in the last layer, [S, Hq, D]."""
    own = np.arange(options.seqs)  # a sequence's block among the tails
    tails = np.zeros((options.layers, 2, options.seqs, BLOCK, KV_HEADS, DIM), ml_dtypes.bfloat16)
    unused = iter(np.random.default_rng(0).permutation(file.geometry.num_blocks))
    tables = np.full((options.seqs, options.steps // BLOCK + 1), -1)  # the same in all layers
    begin = time.perf_counter()
    for step in range(options.steps):
        row, place = divmod(step, BLOCK)  # of the new token
        is_full = place == BLOCK - 1
        lens, stored = np.full(options.seqs, step + 1), np.full(options.seqs, row * BLOCK)
        if is_full:
            tables[:, row] = [next(unused) for _ in own]
        for layer in range(options.layers):
            tail, (q, k, v) = tails[layer], project(step, layer, options.seqs)
            numba_attn.append_kv(k, v, *tail, own * BLOCK + place)
            state = numba_attn.AttentionState.like(q, tail[1])
            counts = {"tile_block_counts": np.ones_like(own), "tile_token_counts": lens - stored}
            numba_attn.step_tile(state, q, *tail, own[:, None], **counts)
            then = None
            if layer + 1 < options.layers:
                then = file.layer(layer + 1), tables, lens
            elif not is_full:  # else the next step has one more block on disk
                then = file.layer(0), tables, lens + 1
            more = {"tile_token_counts": stored, "state": state, "then": then}
            out = streamer.attend(q, file.layer(layer), tables, lens, **more)
            if is_full:
                file.write_blocks(layer, tables[:, row], *tail)
        if (step + 1) % options.every == 0:
            taken, begin = time.perf_counter() - begin, time.perf_counter()
            on_disk = options.layers * options.seqs * ((step + 1) // BLOCK) * BLOCK_BYTES
            resident = tails.nbytes + streamer.resident_blocks * BLOCK_BYTES
            sizes = f"{on_disk / 1e6:.2f} MB on disk, {resident / 1e6:.2f} MB in memory"
            print(f"context {step + 1}: {sizes}, {taken / options.every * 1e3:.2f} ms a step")
    return out


def project(step, layer, num_seqs):
    """Stand in for a model: q (float32), k and v of a new token, [S, heads, D]."""
    rng = np.random.default_rng((step, layer))
    heads = rng.standard_normal((num_seqs, Q_HEADS + 2 * KV_HEADS, DIM), np.float32)
    q, k, v = np.split(heads, [Q_HEADS, Q_HEADS + KV_HEADS], axis=1)
    return q, k.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16)


def expected(options):
    """Return the same in float64, over a cache that was never on disk."""
    tokens = [project(step, options.layers - 1, options.seqs) for step in range(options.steps)]
    q, k, v = (np.stack(x, axis=1) for x in zip(*tokens, strict=True))  # [S, steps, heads, D]
    q = q[:, -1].astype(np.float64)
    return numba_attn.reference.paged_attention(q, k, v, None, [options.steps] * options.seqs)


if __name__ == "__main__":
    sys.exit(main())
