"""The README's snippets run as they stand, and CI runs its commands."""

import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """Run all snippets, in order, in one namespace."""
    names = {}
    for number, snippet in enumerate(fenced("python")):
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), names)
    return names


LIBRARIES = {"torch": ["torch"], "jax": ["jax"], "transformers": ["torch", "transformers"]}


@pytest.fixture
def run_with(names):
    """Run the snippet of a library after the others, where it is installed."""

    def run(library):
        for needed in LIBRARIES[library]:
            pytest.importorskip(needed, reason=f"{needed} is not installed")
        found = dict(names)
        for needed in LIBRARIES[library]:
            for snippet in fenced(f"python {needed}"):
                exec(compile(snippet, f"README.md, {needed}", "exec"), found)
        return found

    return run


def as_float(array):
    return array.astype(np.float64)


def test_the_snippets_run_and_agree(names):
    q, k_pool, v_pool = names["q"], names["k_pool"], names["v_pool"]
    exact, lse = names["numba_attn"].reference.paged_attention(
        q, k_pool, v_pool, names["block_tables"], names["seq_lens"], return_lse=True
    )
    for name in ("tiled", "merged", "both", "streamed", "remote", "joined"):
        np.testing.assert_allclose(as_float(names[name]), as_float(exact), rtol=0.01, atol=1e-3)
    np.testing.assert_allclose(names["lse"], lse, rtol=1e-6)
    np.testing.assert_allclose(names["both_lse"] * np.log(2), lse, rtol=1e-6)
    # `out` is at the end that of the contiguous cache
    np.testing.assert_allclose(
        as_float(names["out"]), as_float(names["exact"]), rtol=0.01, atol=1e-3
    )


def test_the_snippet_of_torch(run_with):
    found = run_with("torch")
    expected = found["torch"].nn.functional.scaled_dot_product_attention(
        *(found[name][:1].float() for name in ("query", "key", "value"))
    )  # of one sequence and all its keys
    whole = found["numba_attn"].paged_attention(
        found["query"][:1, :, -1],
        *(found[name][:1].transpose(1, 2) for name in ("key", "value")),
        None,
        [1024],
    )
    found["torch"].testing.assert_close(whole.float(), expected[:, :, -1], rtol=0.02, atol=2e-3)
    assert found["from_torch"].dtype == found["torch"].bfloat16
    assert not found["torch"].equal(found["from_torch"][:1], whole)  # which has 24 keys more


def test_the_snippet_of_jax(run_with):
    found = run_with("jax")
    inputs = (found[name] for name in ("q", "k_pool", "v_pool", "block_tables", "seq_lens"))
    assert isinstance(found["from_jax"], found["jnp"].ndarray)
    expected = found["numba_attn"].paged_attention(*inputs)
    np.testing.assert_array_equal(np.asarray(found["from_jax"]), expected)


def test_the_snippet_of_transformers(run_with):
    found = run_with("transformers")
    found["model"].set_attn_implementation("eager")
    prompt = found["torch"].tensor([[1, 2, 3]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert found["torch"].equal(found["text"], found["model"].generate(prompt, **options))


def test_the_snippet_of_a_front_end(names):
    """The pools of the snippets have the new tokens by then."""
    reference = names["numba_attn"].reference
    inputs = [names[name] for name in ("q", "k_pool", "v_pool", "block_tables")]
    exact, lse = reference.paged_attention(*inputs, names["seq_lens"] + 1, return_lse=True)
    np.testing.assert_allclose(
        as_float(names["attended"][:, 0]), as_float(exact), rtol=0.01, atol=1e-3
    )
    np.testing.assert_allclose(names["softmax_lse"][:, :, 0], lse, rtol=1e-6)


def test_the_snippets_of_options_agree_with_the_reference(names):
    reference = names["numba_attn"].reference
    inputs = [names[name] for name in ("k_pool", "v_pool", "block_tables", "seq_lens")]
    options = {"sliding_window": 128, "sinks": names["sinks"], "softcap": 50.0}
    exact = {
        "windowed": reference.paged_attention(names["q"], *inputs, **options),
        "verified": reference.paged_attention(names["drafts"], *inputs),
        "sparse": reference.paged_attention(
            names["q"],
            *(names[name] for name in ("k_rows", "v_rows", "picked")),
            [200, 150],
            **names["row_scales"],
        ),
    }
    for name, expected in exact.items():
        assert names[name].dtype == expected.dtype
        np.testing.assert_allclose(
            as_float(names[name]), as_float(expected), rtol=0.01, atol=2e-3, err_msg=name
        )


def test_appended_int8_is_close_to_what_was_given(names):
    stored = (
        names["k_rows"][names["slots"], 0]
        * names["k_scale"].reshape(-1, 8)[names["slots"], :, None]
    )
    given = as_float(names["keys"])
    assert np.abs(stored - given).max() <= np.abs(given).max() / 127


def test_the_example_takes_about_15_lines():
    lines = [line for line in fenced("python")[0].splitlines() if line]
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 100


def test_every_fence_is_known():
    of_libraries = {f"python {name}" for name in LIBRARIES}
    assert set(re.findall(r"^```(\w.*)$", README, re.MULTILINE)) == {"python", "sh", *of_libraries}
    assert len(fenced("python")) == 13


def test_the_two_commands():
    assert fenced("sh") == [
        "pip install . && python -m numba_attn\n",
        "pip install '.[test]' && pytest\n",
    ]


def test_ci_runs_the_commands_of_the_readme():
    script = ROOT / ".ci" / "run"
    if not script.exists() or shutil.which("bash") is None:
        pytest.skip("no .ci/run here (an sdist), or no bash")
    listed = subprocess.run(
        ["bash", script, "readme-commands"], capture_output=True, check=True, text=True
    )
    assert listed.stdout == "".join(fenced("sh"))


def test_what_it_says_is_supported_matches_the_signatures():
    import inspect

    import numba_attn

    options = set(inspect.signature(numba_attn.paged_attention).parameters)
    row = next(line for line in README.splitlines() if line.startswith("| options |"))
    now, later = (set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")[2:4])
    assert now <= options
    assert not later & options


def test_changes_have_a_numerics_heading():
    changes = README[README.index("## Changes") :]
    assert re.search(r"^#+ Numerics$", changes, re.MULTILINE)
    assert f"### {__import__('numba_attn').__version__}\n" in changes
