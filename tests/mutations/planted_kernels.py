"""Bugs in finding and making the compiled kernels."""

from tests.mutations.planted import UNIT, Planted

BUILD = f"{UNIT}/kernels/test_build.py"
STATES = f"{UNIT}/kernels/test_states.py"
PAGES = f"{UNIT}/kernels/test_pages.py"
ROUTING = f"{UNIT}/kernels/test_routing.py"

KERNEL_BUGS = (
    Planted(
        "a CPU gets kernels that it cannot run",
        "kernels/shared/compiler.py",
        "        if has.issuperset(needs) and path.exists():\n",
        "        if path.exists():\n",
        BUILD,
    ),
    Planted(
        "kernels of other sources are taken",
        "kernels/shared/compiler.py",
        "        digest.update(source.read_bytes())\n",
        "        digest.update(source.name.encode())\n",
        BUILD,
    ),
    Planted(
        "what a wheel brought is not looked for",
        "kernels/shared/build.py",
        "    if made is not None:\n",
        "    if False and made is not None:\n",
        BUILD,
    ),
    Planted(
        "all head groups have the bias of the first",
        "kernels/causal_conv/cpu.cpp",
        "std::copy(bias + g * channels, bias + (g + 1) * channels, out);\n",
        "std::copy(bias, bias + channels, out);\n",
        STATES,
    ),
    Planted(
        "a token's change is made again after its checkpoint",
        "kernels/gated_delta/cpu.cpp",
        "left.k = nullptr;\n",
        "",
        STATES,
    ),
    Planted(
        "keys of half width lose every second element",
        "kernels/attention/cpu.cpp",
        "store(columns + (e + 2 * i + 1) * PANEL, (vec)(square[i] & 0xffff0000u));\n",
        "store(columns + (e + 2 * i + 1) * PANEL, (vec)(square[i] << 16));\n",
        PAGES,
    ),
    Planted(
        "a page's slots go on in the next page",
        "kernels/attention/cpu.cpp",
        "if (slot == cache.page_tokens) page++, slot = 0;\n",
        "if (slot == cache.page_tokens) slot = 0;\n",
        PAGES,
    ),
    Planted(
        "a time step has no bounds",
        "kernels/mamba2/cpu.cpp",
        "const float bound = std::min(std::max(free, dt_min), dt_max);\n",
        "const float bound = free;\n",
        STATES,
    ),
    Planted(
        "what passes a Mamba-2 head by is not gated",
        "kernels/mamba2/cpu.cpp",
        "to[i] = __builtin_fmaf(skip[head], x[i], columns[i]) * silu(gate[i]);\n",
        "to[i] = __builtin_fmaf(skip[head], x[i], columns[i] * silu(gate[i]));\n",
        STATES,
    ),
    Planted(
        "heads that share no B and C are one group",
        "workers/models/architectures/granite.py",
        "key_heads=groups if head_groups % groups else head_groups,\n",
        "key_heads=head_groups,\n",
        f"{UNIT}/workers/models/test_granite.py",
    ),
    Planted(
        "experts of all groups are chosen from",
        "kernels/moe/cpu.cpp",
        "if (groups > 1) keep_groups(",
        "if (groups > experts) keep_groups(",
        ROUTING,
    ),
    Planted(
        "what counts for the choice alone is in the weights",
        "kernels/moe/cpu.cpp",
        "= p[order[i]] / (renormalise ? kept : total) * scale;\n",
        "= choice[order[i]] / (renormalise ? kept : total) * scale;\n",
        ROUTING,
    ),
    Planted(
        "all experts have the bias of the first",
        "kernels/moe/cpu.cpp",
        "bias ? bias + e * width : nullptr",
        "bias",
        f"{UNIT}/kernels/test_moe.py",
    ),
    Planted(
        "all heads are products of the first",
        "kernels/linear/cpu.cpp",
        "const float* in = x + h * x_head;\n",
        "const float* in = x;\n",
        f"{UNIT}/kernels/test_linear.py",
    ),
    Planted(
        "the values of latents are what lies behind them",
        "kernels/shared/pages.py",
        "    kv = kv if cache.shape[2] > 1 else 0\n",
        "    kv = page // 2\n",
        f"{UNIT}/kernels/test_pages.py",
    ),
)
