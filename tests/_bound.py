"""The error bound: at most twice a plain float32 evaluation's error, and a few roundings."""

import ml_dtypes
import numpy as np
from _cases import BFLOAT16, Answer, Sequences
from _oracle import dense

EPS = 2.0**-24


def half_ulp(x, dtype=BFLOAT16):
    """Half the distance between neighbours of x in a dtype."""
    info = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(0.5, np.maximum(exponent, info.minexp + 1) - info.nmant - 1)


def row_scale(ref):
    """Return each row's largest finite magnitude [..., 1]; 1 for a row of zeros."""
    largest = np.abs(np.where(np.isfinite(ref), ref, 0)).max(axis=-1, keepdims=True)
    return np.where(largest == 0, 1, largest)


def check_values(what, x, ref, plain, scale, slack=0.0):
    """Assert max|x - ref| <= 2 max|plain - ref| + 8 eps max(1, max|ref|), in units of `scale`.

    What is not finite must be the same in x and ref.
    """
    x, plain = np.asarray(x, np.float64), np.asarray(plain, np.float64)
    finite = np.isfinite(ref)
    np.testing.assert_array_equal(x[~finite], ref[~finite], err_msg=f"{what}: not finite")
    assert np.isfinite(x[finite]).all(), f"{what}: NaN or inf where the reference is finite"
    if not finite.any():
        return
    scaled = [np.where(finite, a, 0) / scale for a in (x, ref, plain, np.zeros_like(ref) + slack)]
    x, ref, plain, slack = scaled
    bound = 2 * np.abs(plain - ref).max() + 8 * EPS * max(1, np.abs(ref).max())
    excess = np.abs(x - ref) - slack
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= bound, (
        f"{what}: off by {excess[worst]:.3g} at {tuple(map(int, worst))}, bound {bound:.3g}"
    )


def check_answer(seqs: Sequences, answer: Answer) -> None:
    """Check `out` and float32 `lse`, sinks included: a row for each query, or as q has them."""
    ref, plain = dense(seqs), dense(seqs, np.float32)
    out = np.asarray(answer.out, np.float64).reshape(ref.out.shape)
    rounding = half_ulp(np.where(np.isfinite(out), out, 0), answer.out.dtype)
    check_values("out", out, ref.out, plain.out, row_scale(ref.out), rounding)
    check_values("lse", np.reshape(answer.lse, ref.lse.shape), ref.lse, plain.lse, 1.0)


def normalise(state_arrays) -> Answer:
    """Return o / l and m + log(l) of a state's m, l, o in float64."""
    m, l, o = (np.asarray(x, np.float64) for x in state_arrays)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(l[..., None] == 0, 0, o / l[..., None])
        return Answer(out, np.where(l == 0, -np.inf, m + np.log(l)))


def check_state(seqs: Sequences, state_arrays) -> None:
    """Check a state's m, l, o after attention over all tokens; nothing is rounded to a dtype.

    No sink has entered it.
    """
    seqs = seqs.but(sinks=None)
    ref, plain, x = dense(seqs), dense(seqs, np.float32), normalise(state_arrays)
    check_values("o / l", x.out, ref.out, plain.out, row_scale(ref.out))
    check_values("m + log(l)", x.lse, ref.lse, plain.lse, 1.0)


def check_close(seqs: Sequences, a: Answer, b: Answer) -> None:
    """Check that two answers before rounding (o / l, lse) agree within the bound of the case.

    No sink has entered them.
    """
    seqs = seqs.but(sinks=None)
    ref, plain = dense(seqs), dense(seqs, np.float32)
    for what, scale in (("out", row_scale(ref.out)), ("lse", 1.0)):
        x, y, r, p = (np.asarray(getattr(t, what), np.float64) for t in (a, b, ref, plain))
        with np.errstate(invalid="ignore"):  # -inf of an empty row less itself
            error = p - r
        check_values(what, x, y, y + error, scale)


def assert_same_bits(*pairs) -> None:
    """Assert that arrays are equal bit for bit, NaN and signed zeros included."""
    for a, b in pairs:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))
