"""Reading the disassembly: a kernel as short as can be, with the turns that real ones take."""

import pytest

from numba_attn import _ptx, _sass

KERNEL = """
	.target	sm_90
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   STS.128 [R8], R4 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   LDG.E.64.CONSTANT R6, desc[UR4][R2.64] ;
        /*0060*/             @!UP0 BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0080*/                   LDGSTS.E.BYPASS.LTC128B.128 [R8], desc[UR4][R2.64], !P1 ;
        /*0090*/                   LDS.U16 R9, [R8] ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/                   BRA.DIV UR9, `(.L_x_6) ;
.L_x_4:
        /*00c0*/                   SHFL.BFLY PT, R10, R9, 0x10, 0x1f ;
.L_x_5:
        /*00d0*/                   FFMA R11, R10, R10, R11 ;
        /*00e0*/                   IMAD.WIDE R12, R10, 0x10, R12 ;
        /*00f0*/               @P1 BRA P2, `(.L_x_5) ;
        /*0100*/                   MUFU.EX2 R11, R11 ;
        /*0110*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0120*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64) ;
        /*0130*/                   DADD R14, R14, R16 ;
        /*0140*/               @P3 BRA `(.L_x_1) ;
        /*0150*/                   STL [R1], R11 ;
        /*0160*/                   EXIT ;
.L_x_6:
        /*0170*/                   SHFL.BFLY PT, R10, R9, 0x10, 0x1f ;
        /*0180*/                   BRA `(.L_x_4) ;
.L_x_7:
        /*0190*/                   BRA `(.L_x_7);
"""
FILL, OUTER, MAIN, INNER = (
    _sass.Loop(*ends) for ends in ((2, 5), (5, 21), (7, 18), (13, 16))
)  # by the position of their first instruction, and after their last


@pytest.fixture
def program():
    return _sass.parse(KERNEL)


def test_instructions(program):
    assert [x.address for x in program.instructions] == list(range(0, 0x1A0, 16))
    branch = program.instructions[6]
    assert (branch.predicate, branch.opcode, branch.target) == ("!UP0", "BRA", ".L_x_3")
    assert program.instructions[7][1:] == ("", "LDG.E.128", "R4, desc[UR4][R2.64]")
    assert program.labels[".L_x_4"] == 12


@pytest.mark.parametrize(
    ("position", "kind"),
    [(1, "LDG.32"), (5, "LDG.64"), (8, "LDGSTS.128"), (9, "LDS.16"), (14, "IMAD"), (18, "DIV64")],
)
def test_kind(program, position, kind):
    assert program.instructions[position].kind == kind


def test_what_never_executes_reads_no_memory():
    before_a_copy, *others = _sass.parse(
        "/*0000*/ @!PT LDS RZ, [RZ] ;\n/*0010*/ @PT LDS R1, [R2] ;\n/*0020*/ @!P1 LDS R1, [R2] ;"
    ).instructions
    assert before_a_copy.kind == "OTHER"
    assert [one.kind for one in others] == ["LDS.32"] * 2


def test_loops(program):
    """Neither the way back from diverged threads nor the padding's branch to itself is one."""
    loops = _sass.find_loops(program)
    assert loops == [FILL, INNER, MAIN, OUTER]
    assert _sass.innermost(loops) == [FILL, INNER]
    assert _sass.outer_loop(program, MAIN) == OUTER
    assert _sass.outer_loop(program, OUTER) is None


def test_the_main_loop_loads_and_multiplies(program):
    assert _sass.main_loop(program) == MAIN


def test_without_wide_loads_the_longest_innermost_loop_is_the_main_one():
    lines = KERNEL.replace(".128", "").splitlines()
    narrow = "\n".join(line for line in lines if " STS" not in line)  # so FILL is shorter
    assert _sass.main_loop(_sass.parse(narrow)) == _sass.Loop(INNER.begin - 1, INNER.end - 1)
    assert _sass.main_loop(_sass.parse(" /*0000*/ EXIT ;")) is None


def test_count(program):
    once = {"LDG.128": 1, "LDGSTS.128": 1, "LDS.16": 1, "BAR": 1, "SHFL": 1, "MUFU": 1}
    assert _sass.count(program, MAIN) == once | {"OTHER": 3, "FMA": 1, "IMAD": 1}
    assert _sass.count(program, MAIN, 0) == once | {"OTHER": 2}
    assert _sass.count(program, MAIN, 5) == once | {"OTHER": 7, "FMA": 5, "IMAD": 5}


def test_passes_multiply_from_loop_to_loop(program):
    passes = _sass.count(program, OUTER, lambda kinds: 7 if kinds["BAR"] else 3)
    assert (passes["DIV64"], passes["F64"], passes["SHFL"], passes["FMA"]) == (1, 1, 7, 21)


def test_count_of_the_whole_kernel(program):
    counts = _sass.count(program)
    assert (counts["LDG.32"], counts["LDG.128"], counts["SHFL"], counts["LOCAL"]) == (1, 2, 1, 1)
    assert sum(counts.values()) == len(program.instructions) - 3


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [
        (32, 0, 1024, 2),  # warps
        (32, 0, 32, 32),  # blocks
        (128, 0, 128, 4),  # registers
        (96, 0, 128, 5),  # registers of a processor: 5 warps fit each, not 5.33
        (129, 0, 128, 3),  # in units of 256 for a warp
        (32, 48 * 1024, 128, 4),  # shared memory, with a KiB for each block
        (255, 0, 1024, 0),
    ],
)
def test_occupancy(registers, shared, threads, blocks):
    assert _sass.occupancy(registers, shared, threads) == blocks


def test_a_kernel_is_disassembled_where_asked(tmp_path):
    if reason := _ptx.missing(disassembler=True):
        pytest.skip(reason)
    import numba
    from numba.cuda import types

    from numba_attn.kernels._jit import cuda_kernel

    def halve(x, count):
        for i in range(count // 2):
            x[i] *= numba.float32(0.5)

    kernel = cuda_kernel(halve)
    signature = (types.Array(types.float32, 1, "C"), types.int64)
    assert not _ptx.compile_kernel(kernel, signature, (9, 0), tmp_path).sass
    compiled = _ptx.compile_kernel(kernel, signature, (9, 0), tmp_path, disassemble=True)
    counts = _sass.count(_sass.parse(compiled.sass))
    assert counts["LDG.32"] == counts["STG.32"] > 0
    assert counts["FMA"] >= counts["LDG.32"]
