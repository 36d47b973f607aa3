"""Bugs to plant in the kernels."""

from tests.mutations.planted import Planted

BUGS: tuple[Planted, ...] = (
    Planted(
        "half-width keys lose every second element",
        "kernels/attention/cpu.cpp",
        "uint16_t $BITS; std::memcpy(&$BITS, $FROM + 2 * $E,",
        "uint16_t $BITS; std::memcpy(&$BITS, $FROM + 2 * ($E & ~1),",
        "tests/unit/kernels/test_pages.py",
    ),
    Planted(
        "the copy engine receives a stride of zero",
        "kernels/attention/cuda.py::_tiles",
        "if $SHAPE[$AT] == 1:",
        "if False:",
        "tests/unit/workers/execution/test_launches.py",
    ),
    Planted(
        "every head group uses the bias of the first",
        "kernels/causal_conv/cpu.cpp",
        "$BIAS ? $BIAS + $G * $CHANNELS :",
        "$BIAS ? $BIAS :",
        "tests/unit/kernels/test_states.py",
    ),
    Planted(
        "gated delta applies a token's update again after its checkpoint",
        "kernels/gated_delta/cpu.cpp",
        "        $LEFT.$K = $NULLPTR;",
        "",
        "tests/unit/kernels/test_states.py",
    ),
    Planted(
        "every head is multiplied by the first head's weights",
        "kernels/linear/cpu.cpp",
        "(const char*)$PACKED + $H * $HEAD_BYTES,",
        "(const char*)$PACKED,",
        "tests/unit/kernels/test_linear.py",
    ),
    Planted(
        "rows in bfloat16 of an odd stride are taken where they do not lie",
        "kernels/linear/cpu.cpp",
        "$STRIDE % 2 == 0 && ",
        "",
        "tests/unit/kernels/test_linear.py",
    ),
    Planted(
        "Mamba-2 does not clamp the time step",
        "kernels/mamba2/cpu.cpp",
        "$CONST float $BOUND = $STD::min($STD::max($FREE, $DT_MIN), $DT_MAX);",
        "$CONST float $BOUND = $FREE;",
        "tests/unit/kernels/test_states.py",
    ),
    Planted(
        "routing picks experts from every group",
        "kernels/moe/cpu.cpp",
        "> 1) $KEEP_GROUPS",
        "> experts) $KEEP_GROUPS",
        "tests/unit/kernels/test_routing.py",
    ),
    Planted(
        "a step with experts waits for the experts' token counts",
        "kernels/moe/cuda.py::tiles",
        "$M = $TILE_TOKENS($PAIRS, $EXPERTS)",
        "$M = $TILE_TOKENS($PAIRS, int(choice.experts_TK.max()))",
        "tests/unit/workers/execution/test_launches.py",
    ),
    Planted(
        "pairs of later blocks of tokens overwrite those of earlier blocks",
        "kernels/moe/order.py::sort_pairs",
        "start_E + before_E)",
        "start_E)",
        "tests/triton/test_moe.py",
    ),
    Planted(
        "the padding of a batch chooses experts",
        "kernels/shared/row_of.py::pads",
        "tl.load(lens + row) == 0",
        "tl.load(lens + row) < 0",
        "tests/triton/test_moe.py",
    ),
    Planted(
        "kernels prebuilt in a wheel are ignored",
        "kernels/shared/build.py::build",
        "if $MADE is not None:",
        "if False and $MADE is not None:",
        "tests/unit/kernels/test_build.py",
    ),
    Planted(
        "a CPU loads kernels built for instructions it lacks",
        "kernels/shared/compiler.py::found_ahead",
        "if $HAS.$ISSUPERSET($NEEDS) and $PATH.$EXISTS():",
        "if $PATH.$EXISTS():",
        "tests/unit/kernels/test_build.py",
    ),
    Planted(
        "latent attention reads its values behind the latents",
        "kernels/shared/pages.py::page_arguments",
        "$KV = $KV if $CACHE.$SHAPE[2] > 1 else 0",
        "$KV = page // 2",
        "tests/unit/kernels/test_pages.py",
    ),
)
