"""The error bound: at most twice a plain float32 evaluation's error, and a few roundings."""

import numpy as np
from _cases import Answer, Sequences, dense

EPS = 2.0**-24


def half_ulp_bfloat16(x):
    """Half the distance between bfloat16 neighbours of x."""
    _, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(0.5, np.maximum(exponent, -125) - 8)


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
    """Check bfloat16 `out` [S, Hq, Dv] and float32 `lse` [S, Hq] of attention over all tokens."""
    ref, plain = dense(seqs), dense(seqs, np.float32)
    out = np.asarray(answer.out, np.float64)
    rounding = half_ulp_bfloat16(np.where(np.isfinite(out), out, 0))
    check_values("out", out, ref.out, plain.out, row_scale(ref.out), rounding)
    check_values("lse", answer.lse, ref.lse, plain.lse, 1.0)


def normalise(state_arrays) -> Answer:
    """Return o / l and m + log(l) of a state's m, l, o in float64."""
    m, l, o = (np.asarray(x, np.float64) for x in state_arrays)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(l[..., None] == 0, 0, o / l[..., None])
        return Answer(out, np.where(l == 0, -np.inf, m + np.log(l)))


def check_state(seqs: Sequences, state_arrays) -> None:
    """Check a state's m, l, o after attention over all tokens; nothing is rounded to bfloat16."""
    ref, plain, x = dense(seqs), dense(seqs, np.float32), normalise(state_arrays)
    check_values("o / l", x.out, ref.out, plain.out, row_scale(ref.out))
    check_values("m + log(l)", x.lse, ref.lse, plain.lse, 1.0)


def check_close(seqs: Sequences, a: Answer, b: Answer) -> None:
    """Check that two answers before rounding (o / l, lse) agree within the bound of the case."""
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
