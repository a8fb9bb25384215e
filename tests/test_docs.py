"""Docstrings: every example runs, every public one is complete; signatures are the contract's."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import numba_attn
from numba_attn import AttentionState, reference

FUNCTIONS = [name for name in numba_attn.__all__ if inspect.isroutine(getattr(numba_attn, name))]
METHODS = [
    f"AttentionState.{name}" for name in ("like", "from_partial", "to_partial", "reset", "lse")
]
METHODS += [f"KVFile.{name}" for name in ("create", "layer", "write_blocks", "append_kv", "sync")]
METHODS += ["Source.read", "KVFile.close", "Streamer.attend", "Streamer.close", "ArraySource.read"]
FRAMEWORKS = "torch", "jax", "cupy", "transformers"
PUBLIC = [*FUNCTIONS, "AttentionState", "KVFile", "ArraySource", "Source", "Streamer"]

# DESIGN: the fixed names of the public API
SIGNATURES = {
    "paged_attention": (
        "(q, k_pool, v_pool, block_tables, seq_lens, *, scale=None, softcap=None, "
        "sliding_window=None, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, "
        "causal=True, query_start_loc=None, seq_starts=None, return_lse=False, out=None, "
        "device='auto', state=None, kernel='auto', stream=None)"
    ),
    "AttentionState": "(num_seqs, num_q_heads, head_dim, *, num_queries=None, device='cpu')",
    "AttentionState.like": "(q, v_pool)",
    "AttentionState.from_partial": "(out, lse, *, base='e')",
    "AttentionState.reset": "(self, *, stream=None)",
    "AttentionState.to_partial": "(self, *, base='e')",
    "step_tile": (
        "(state, q, k_pool, v_pool, tile_blocks, tile_block_counts, *, tile_token_counts=None, "
        "tile_starts=None, seq_lens=None, seq_starts=None, query_start_loc=None, causal=True, "
        "scale=None, softcap=None, sliding_window=None, alibi_slopes=None, k_scale=None, "
        "v_scale=None, kernel='auto', stream=None)"
    ),
    "merge": "(state, other, *, stream=None)",
    "finalize": "(state, *, sinks=None, dtype='bfloat16', return_lse=False, out=None, stream=None)",
    "append_kv": (
        "(k, v, k_pool, v_pool, slot_mapping, *, k_scale=None, v_scale=None, compute_scales=False)"
    ),
    "KVFile": "(path, mode='r', *, direct=False)",
    "KVFile.create": (
        "(path, *, num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype='bfloat16', "
        "checksum=False)"
    ),
    "KVFile.layer": "(self, index)",
    "KVFile.write_blocks": "(self, layer, block_ids, k, v)",
    "KVFile.append_kv": "(self, layer, k, v, slot_mapping, **scales)",
    "KVFile.sync": "(self)",
    "ArraySource": "(k_pool, v_pool)",
    "Source.read": "(self, block_ids, k_out, v_out)",
    "ArraySource.read": "(self, block_ids, k_out, v_out)",
    "Streamer": "(resident_blocks, prefetch=2)",
    "Streamer.attend": (
        "(self, q, source, block_tables, seq_lens, *, state=None, then=None, tile_starts=None, "
        "tile_token_counts=None, scale=None, softcap=None, sliding_window=None, alibi_slopes=None, "
        "sinks=None, k_scale=None, v_scale=None, causal=True, query_start_loc=None, "
        "seq_starts=None, return_lse=False, out=None, device='auto', kernel='auto', stream=None, "
        "progress=None)"
    ),
    "Streamer.close": "(self)",
    "stream_attention": (
        "(q, source, block_tables, seq_lens, *, resident_blocks, prefetch=2, return_lse=False, "
        "progress=None, **options)"
    ),
    "available_devices": "()",
    "get_num_threads": "()",
    "set_num_threads": "(num_threads)",
    "warmup": (
        "(num_q_heads, num_kv_heads, head_dim, *, v_head_dim=None, dtype='bfloat16', "
        "kv_dtype=None, softcap=False, alibi=False, token_scales=False, device='cpu')"
    ),
}


def find(name, root=numba_attn):
    for part in name.split("."):
        root = getattr(root, part)
    return root


def signature(target):
    """Write a signature without its annotations."""
    found = inspect.signature(target)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def modules():
    names = [
        "numba_attn",
        *(m.name for m in pkgutil.walk_packages(numba_attn.__path__, "numba_attn.")),
    ]
    return [name for name in names if name != "numba_attn.__main__"]


@pytest.mark.parametrize("name", modules())
def test_examples_run(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in FRAMEWORKS:
            raise
        pytest.skip(f"{error.name} is not installed")
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, optionflags=flags).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    assert ">>> " in inspect.getdoc(find(name))


@pytest.mark.parametrize("name", sorted({*PUBLIC, *METHODS} - {"Source"}))  # has no constructor
def test_numpydoc(name):
    validate = pytest.importorskip("numpydoc.validate", reason="numpydoc is not installed").validate
    # GL08 no docstring; PR parameters; RT returns; SS summary; the rest is taste or ruff's
    codes = {"GL06", "GL07", "GL08", "PR01", "PR02", "PR03", "PR04", "PR06", "PR10", "RT01", "RT03"}
    codes |= {"SS01", "SS02", "SS03", "SS05"}
    errors = validate(f"numba_attn.{name}")["errors"]
    assert not [error for error in errors if error[0] in codes]


def test_all_is_what_is_documented():
    assert {name.split(".")[0] for name in SIGNATURES} | {
        "reference",
        "DamagedBlockError",
    } == set(numba_attn.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert signature(find(name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", ["append_kv", "paged_attention", "step_tile", "merge", "finalize"])
def test_the_reference_has_the_same_signature(name):
    expected = SIGNATURES[name]
    for keyword in (", device='auto'", ", kernel='auto'", ", stream=None"):
        expected = expected.replace(keyword, "")  # what is of a device
    assert signature(find(name, reference)) == expected.replace(", *)", ")")


def test_the_reference_state_has_the_same_names():
    host = reference.AttentionState(2, 4, 8)
    state = AttentionState(2, 4, 8)
    for name in ("m", "l", "o", "lse"):
        assert getattr(host, name).shape == getattr(state, name).shape
    for name in ("from_partial", "to_partial"):
        assert signature(getattr(type(host), name)) == SIGNATURES[f"AttentionState.{name}"]
    assert signature(type(host)) == SIGNATURES["AttentionState"].replace(", device='cpu'", "")


def test_in_place_functions_return_none():
    for name in ("append_kv", "step_tile", "merge", "AttentionState.reset", "set_num_threads"):
        assert inspect.signature(find(name)).return_annotation == "None"
