# pyright: basic
# transformers' functions have no usable types.
"""The definition of `attention` with a window and sinks is that of transformers' GptOss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tests.support.kernels.cases import random, relative_error, shuffled_pages, step
from tidemill.kernels.attention.reference import attention

HEADS, GROUP, DIM, PAGE_TOKENS = 2, 3, 16, 16


@pytest.mark.parametrize("new", [1, 40, 90])
@pytest.mark.parametrize("window", [1, 16, 33, 90])
def test_it_is_that_of_transformers(new: int, window: int) -> None:
    draw, length = torch.Generator().manual_seed(window), 90
    q_THD, kv_L2KD = random(draw, new, HEADS * GROUP, DIM), random(draw, length, 2, HEADS, DIM)
    sinks_H = 3 * random(draw, HEADS * GROUP)
    pages = shuffled_pages([length], PAGE_TOKENS, draw)
    cache = torch.full((1 + int(pages.max()), HEADS, 2, PAGE_TOKENS, DIM), torch.nan)
    for position, kv_2KD in enumerate(kv_L2KD):
        page = int(pages[0, position // PAGE_TOKENS])
        cache[page, :, :, position % PAGE_TOKENS] = kv_2KD.transpose(0, 1)
    found = attention(q_THD, cache, step([new], [length - new], pages), window, sinks_H)

    sees = sliding_window_causal_mask_function(window)
    at = torch.arange(length)
    seen_LL = sees(0, 0, at[:, None], at[None, :])
    mask_NL = torch.zeros(new, length).masked_fill(~seen_LL[length - new :], float("-inf"))
    layer: Any = SimpleNamespace(sinks=sinks_H, num_key_value_groups=GROUP, training=False)
    k_1KLD, v_1KLD = kv_L2KD.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    wanted, _ = eager_attention_forward(
        layer, q_THD.transpose(0, 1)[None], k_1KLD, v_1KLD, mask_NL, scaling=DIM**-0.5
    )
    assert relative_error(found, wanted[0]) < 1e-5
