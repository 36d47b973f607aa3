// Few queries of bfloat16: keys and values are multiplied where they lie in pages. Packing them takes longer.
#pragma once
#include "blocks.h"

namespace {
constexpr int64_t MOST_WEIGHED = LANES == 16 ? 7 : 3;  // four sums of each fit the registers
constexpr int64_t FEW_KEYS = 64;  // of a block: AMX takes longer for them

// The floats of the lower halves of words, and those of the upper ones.
inline void to_halves(const uint32_t* pairs, int64_t count, float* low, float* high) {
    for (int64_t i = 0; i < count; i++) {
        low[i] = __builtin_bit_cast(float, pairs[i] << 16);
        high[i] = __builtin_bit_cast(float, pairs[i] & 0xffff0000u);
    }
}

// The scales of the keys of a block of codes, and of its values.
struct BlockScales {
    uint8_t keys[BLOCK<uint32_t>], values[BLOCK<uint32_t>];

    void find(const Cache& cache, const Scales& scales, const int32_t* table, int64_t head, int64_t start,
              const Block<uint32_t>& block) {
        for (int64_t j = block.from; j < block.to; j++) {
            const int64_t page = table[(start + j) / cache.page_tokens], slot = (start + j) % cache.page_tokens;
            const uint8_t* const at = scales.at(page, head, slot);
            keys[j] = at[0], values[j] = at[scales.kv];
        }
    }
};

// The words of a panel of a row from element `first` on: of bfloat16, or of codes.
template <bool CODED>
__attribute__((always_inline)) inline words panel_words(const char* row, int64_t first, uint8_t scale) {
    if constexpr (CODED) return (words)decode_lanes((const uint8_t*)row + first, scale);
    return load((const uint32_t*)(row + 2 * first));
}

// sums[ROWS][dim] += P V of keys [begin, end) of a block of bfloat16, begin a multiple of STEP, in the order of `multiply`.
// Prefetches the values of the block that is next.
template <int ROWS, bool CODED>
void weigh_values(const Block<uint32_t>& block, const Block<uint32_t>& next, int64_t kv, int64_t dim, const uint32_t* P,
                  int64_t begin, int64_t end, const uint8_t* scales, float* sums) {
    constexpr int64_t PAIRS_OF_BLOCK = BLOCK<uint32_t> / 2;
    float weights[2][ROWS][PAIRS_OF_BLOCK];  // of even keys and of odd ones
    for (int r = 0; r < ROWS; r++)
        to_halves(P + r * PAIRS_OF_BLOCK + begin / 2, (end + 1) / 2 - begin / 2, weights[0][r] + begin / 2,
                  weights[1][r] + begin / 2);
    ints natural[2];  // from columns of even index and those of odd index
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < 2; i++) natural[i][l] = (l + i * LANES) / 2 + (l % 2) * LANES;
    for (int64_t start = begin; start < end; start += STEP) {
        const int64_t from = std::max(start, block.from), to = std::min(start + STEP, end);
        for (int64_t p = 0; p < dim; p += PANEL) {
            vec chains[2][ROWS][2] = {};
            const auto add = [&](int parity, int64_t j) __attribute__((always_inline)) {
                __builtin_prefetch(next.rows[j] + kv + (CODED ? 1 : 2) * p, 0, 2);
                const words value = panel_words<CODED>(block.rows[j] + kv, p, scales[j]);
                const vec columns[2] = {lower(value), upper(value)};
                for (int r = 0; r < ROWS; r++) {
                    const vec weight = splat(weights[parity][r][j / 2]);
                    for (int n = 0; n < 2; n++) chains[parity][r][n] = fused(weight, columns[n], chains[parity][r][n]);
                }
            };
            int64_t j = from;
            if (j % 2) add(1, j++);
            for (; j + 1 < to; j += 2) add(0, j), add(1, j + 1);
            if (j < to) add(0, j);
            for (int r = 0; r < ROWS; r++) {
                float* const to_row = sums + r * dim + p;
                const vec even = chains[0][r][0] + chains[1][r][0], odd = chains[0][r][1] + chains[1][r][1];
                for (int i = 0; i < 2; i++) {
                    float* const at = to_row + i * LANES;
                    store(at, load(at) + __builtin_shuffle(even, odd, natural[i]));
                }
            }
        }
    }
}

// S [ROWS][SIZE] of keys [begin, end) of a block of bfloat16 where they lie, in the order of `multiply`. `factors` of a query
// are the floats of its words' lower halves, then of their upper ones. Scores beside those are not read. Prefetches the
// keys of the block that is next.
template <int ROWS, bool CODED>
void score_keys(const Block<uint32_t>& block, const Block<uint32_t>& next, int64_t depth, const float* factors,
                int64_t begin, int64_t end, const uint8_t* scales, float* S) {
    for (int64_t j = begin / LANES * LANES; j < end; j += LANES) {
        vec sums[ROWS] = {};
        for (int64_t start = 0; start < depth; start += DEPTH_WORDS) {
            for (int64_t i = j; i < j + LANES; i++) __builtin_prefetch(next.rows[i] + start * (CODED ? 2 : 4), 0, 2);
            vec even[ROWS] = {}, odd[ROWS] = {};
            for (int64_t w = start; w < start + DEPTH_WORDS; w += LANES) {
                words square[LANES];
                for (int l = 0; l < LANES; l++) square[l] = panel_words<CODED>(block.rows[j + l], 2 * w, scales[j + l]);
                transpose(square);
                for (int i = 0; i < LANES; i++)
                    for (int r = 0; r < ROWS; r++) {
                        const float* const factor = factors + r * 2 * depth + w + i;
                        even[r] = fused(splat(factor[0]), lower(square[i]), even[r]);
                        odd[r] = fused(splat(factor[depth]), upper(square[i]), odd[r]);
                    }
            }
            for (int r = 0; r < ROWS; r++) sums[r] += even[r] + odd[r];
        }
        for (int r = 0; r < ROWS; r++) store(S + r * BLOCK<uint32_t> + j, sums[r]);
    }
}
}  // namespace
