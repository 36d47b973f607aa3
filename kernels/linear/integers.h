// Weights of 8 bits whose products with codes of x are sums of integers (`integer_product` of reference.py): exact, so
// of one value in any order.
//
// A panel is [scales | shifts | units]: of each column its scale, and what CODE_SHIFT adds to its sum. A unit has 4 rows of
// depth, a word for each column.
#pragma once
#include "../shared/cpu.h"

constexpr int64_t HEADER_BYTES = PANEL * (sizeof(float) + sizeof(int32_t));

static inline int64_t integers_bytes(int64_t units) { return HEADER_BYTES + units * PANEL * 4; }

static void pack_integers(const int8_t* codes, const float* scales, uint8_t* packed, int64_t n, int64_t k) {
    const int64_t units = (k + 3) / 4, bytes = integers_bytes(units);
#pragma omp parallel for
    for (int64_t p = 0; p < (n + PANEL - 1) / PANEL; p++) {
        uint8_t* const panel = packed + p * bytes;
        std::fill(panel, panel + bytes, 0);
        for (int64_t j = 0; j < std::min<int64_t>(PANEL, n - p * PANEL); j++) {
            const int8_t* const row = codes + (p * PANEL + j) * k;
            uint8_t* const column = panel + HEADER_BYTES + j * 4;
            int32_t sum = 0;
            for (int64_t i = 0; i < k; i++) column[i / 4 * PANEL * 4 + i % 4] = row[i], sum += row[i];
            ((float*)panel)[j] = scales[p * PANEL + j];
            ((int32_t*)panel)[PANEL + j] = sum * CODE_SHIFT;
        }
    }
}

// sum + x w in each lane, of 4 products of codes. No step saturates: of vpmaddubsw, two products of at most 128 * 127.
#if defined(__AVX512VNNI__)
constexpr int INTEGER_ROWS = 12;

static inline words plus_products(words sum, words x, words w) {
    return (words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
}
#elif defined(__AVX512BW__)
constexpr int INTEGER_ROWS = 6;

static inline words plus_products(words sum, words x, words w) {
    const __m512i signs = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)w), __m512i{}, (__m512i)x);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), signs);
    return sum + (words)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int INTEGER_ROWS = 3;

static inline words plus_products(words sum, words x, words w) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
    return sum + (words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr int INTEGER_ROWS = 3;

static inline words plus_products(words sum, words x, words w) {
    for (int byte = 0; byte < 4; byte++)
        sum += (words)(((ints)(x << (24 - 8 * byte)) >> 24) * ((ints)(w << (24 - 8 * byte)) >> 24));
    return sum;
}
#endif

// y[ROWS][PANEL] of rows of `units` words and their scales. Few rows have several sums of each element, to hide the latency
// of one.
template <int ROWS>
static void integer_tile(const uint32_t* rows, int64_t stride, int64_t units, const uint8_t* panel, const float* bias, float* y,
                         int64_t y_stride) {
    constexpr int SUMS = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
    constexpr int64_t AHEAD_WORDS = 2048;
    const uint32_t* const unit = (const uint32_t*)(panel + HEADER_BYTES);
    words sums[SUMS][ROWS][2] = {};
    const auto step = [&](int64_t u, words (&to)[ROWS][2]) __attribute__((always_inline)) {
        const words w[2] = {load(unit + u * PANEL), load(unit + u * PANEL + LANES)};
        ask<3>(unit + u * PANEL + AHEAD_WORDS);  // of the next panels too, which follow
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < 2; n++) to[r][n] = plus_products(to[r][n], splat(rows[r * stride + u]), w[n]);
    };
    int64_t u = 0;
    for (; u + SUMS <= units; u += SUMS)
        for (int s = 0; s < SUMS; s++) step(u + s, sums[s]);
    for (; u < units; u++) step(u, sums[0]);
    for (int r = 0; r < ROWS; r++) {
        const vec scale = splat(__builtin_bit_cast(float, rows[r * stride + units]));
        for (int n = 0; n < 2; n++) {
            words sum = sums[0][r][n] - load((const uint32_t*)panel + PANEL + n * LANES);
            for (int s = 1; s < SUMS; s++) sum += sums[s][r][n];
            const vec scaled = __builtin_convertvector((ints)sum, vec) * scale * load((const float*)panel + n * LANES);
            store(y + r * y_stride + n * LANES, scaled + load(bias + n * LANES));
        }
    }
}

// The same of at most INTEGER_ROWS rows.
template <int ROWS = INTEGER_ROWS>
static void integer_tiles(int64_t count, const uint32_t* rows, int64_t stride, int64_t units, const uint8_t* panel,
                          const float* bias, float* y, int64_t y_stride) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) return integer_tiles<ROWS - 1>(count, rows, stride, units, panel, bias, y, y_stride);
    }
    integer_tile<ROWS>(rows, stride, units, panel, bias, y, y_stride);
}
