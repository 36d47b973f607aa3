// Weights as codes of 4 or 8 bits (stored.py), which become what a tile takes: floats, or pairs of bfloat16.
//
// A panel is a run of pieces, one for each group of columns: [scales | offsets | codes]. The codes of 4 rows of depth are a
// unit, in the order of the elements that they become. In 4 bits a word of a unit has a code of each of its 8 vectors.
#pragma once
#include "../shared/cpu.h"

constexpr int64_t UNIT = 4;  // rows of depth
constexpr int64_t AHEAD_BYTES = 8192;
constexpr int VECTORS = UNIT * PANEL / LANES;

constexpr int64_t bits_of(int64_t code) { return code >= INT4 ? 4 : 8; }

// Of weights of that kind, of depth k.
struct Codes {
    int64_t code, is_shifted, group, pieces, header, bytes;  // of a piece

    Codes(int64_t kind, int64_t k) : code(code_of(kind)), is_shifted(kind >> SHIFTED_BIT & 1) {
        const int64_t given = kind >> GROUP_BIT;
        group = given ? given : (k + UNIT - 1) / UNIT * UNIT;
        pieces = (k + group - 1) / group;
        header = (1 + is_shifted) * PANEL * sizeof(float);
        bytes = header + group * PANEL * bits_of(code) / 8;
    }
};

constexpr float NUMBERS[3][16] = {{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
                                  {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                  {0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6}};

// Numbers are less by this factor, which scales have instead: of e4m3, whose fields are those of half precision.
constexpr float factor_of(int64_t code) { return code == FP8 ? 256.0f : 1.0f; }

// Without NaN.
static inline vec numbers_of_fp8(const uint8_t* codes) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbfff)));
#else
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes given;
    std::memcpy(&given, codes, sizeof given);
    const words code = __builtin_convertvector(given, words), size = code & 0x7f;
    const vec normal = (vec)((size << 20) + (112u << 23)), denormal = __builtin_convertvector((ints)size, vec) * 0x1p-17f;
    return (vec)((words)(size < 8 ? denormal : normal) | (code & 0x80) << 24);
#endif
}

// The numbers of LANES codes, those of vector v of a unit.
template <int64_t CODE>
static inline vec numbers(const uint8_t* unit, int v) {
    if constexpr (CODE == INT8) {
#if defined(__AVX512F__)
        return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(unit + v * LANES))));
#else
        typedef int8_t bytes __attribute__((vector_size(LANES)));
        bytes given;
        std::memcpy(&given, unit + v * LANES, sizeof given);
        return __builtin_convertvector(given, vec);
#endif
    } else if constexpr (CODE == FP8) {
        return numbers_of_fp8(unit + v * LANES);
    } else {
        const float* const table = NUMBERS[CODE - INT4];
        const ints code = (ints)(load((const uint32_t*)unit) >> 4 * v);
        if constexpr (LANES == 16) return __builtin_shuffle(load(table), code);
        else return __builtin_shuffle(load(table), load(table + 8), code);
    }
}

// The scales or offsets of a panel's columns, times `factor`, as vectors of elements have them: of pairs a column twice.
template <bool PAIRED>
static inline void spread(const float* columns, vec* out, float factor = 1.0f) {
    for (int i = 0; !PAIRED && i < 2; i++) out[i] = load(columns + i * LANES) * factor;
    for (int i = 0; PAIRED && i < 4; i++) {
        ints from;
        for (int l = 0; l < LANES; l++) from[l] = i % 2 * (LANES / 2) + l / 2;
        out[i] = __builtin_shuffle(load(columns + i / 2 * LANES), from) * factor;
    }
}

// Two vectors of floats, rounded to bfloat16. None is denormal, or NaN.
#if defined(__AVX512BF16__)
static inline words pairs(vec first, vec second) { return (words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
#endif

static inline void store_pairs(uint16_t* out, vec first, vec second) {
#if defined(__AVX512BF16__)
    const words both = pairs(first, second);
    std::memcpy(out, &both, sizeof both);
#else
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    for (const words bits : {(words)first, (words)second}) {
        const halves rounded = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, halves);
        std::memcpy(out, &rounded, sizeof rounded);
        out += LANES;
    }
#endif
}

template <int64_t BYTES>
static inline void ask_unit(const uint8_t* unit) {
    for (int64_t byte = 0; byte < BYTES; byte += LINE) __builtin_prefetch(unit + byte + AHEAD_BYTES, 0, 3);
}

// The factors of `depth` rows of a panel from `start` on, both whole units.
template <bool PAIRED, int64_t CODE, bool SHIFTED>
static void decode(const Codes& codes, const uint8_t* panel, int64_t start, int64_t depth, void* out) {
    constexpr int COLUMNS = PAIRED ? 4 : 2;
    constexpr int64_t UNIT_BYTES = UNIT * PANEL * bits_of(CODE) / 8;
    for (int64_t i = start, stop; i < start + depth; i = stop) {
        const int64_t piece = i / codes.group;
        const uint8_t *const from = panel + piece * codes.bytes, *unit = from + codes.header;
        vec scale[COLUMNS], offset[COLUMNS];
        spread<PAIRED>((const float*)from, scale, factor_of(CODE));
        if (SHIFTED) spread<PAIRED>((const float*)from + PANEL, offset);
        stop = std::min(start + depth, (piece + 1) * codes.group);
        unit += (i - piece * codes.group) / UNIT * UNIT_BYTES;
        for (int64_t k = i; k < stop; k += UNIT, unit += UNIT_BYTES) {
            const auto value = [&](int v) __attribute__((always_inline)) {
                const vec scaled = numbers<CODE>(unit, v) * scale[v % COLUMNS];
                return SHIFTED ? scaled + offset[v % COLUMNS] : scaled;
            };
            ask_unit<UNIT_BYTES>(unit);
            if constexpr (PAIRED) {
                uint16_t* const to = (uint16_t*)out + (k - start) * PANEL;
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v += 2) store_pairs(to + v * LANES, value(v), value(v + 1));
            } else {
                float* const to = (float*)out + (k - start) * PANEL;
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) store(to + v * LANES, value(v));
            }
        }
    }
}

typedef void (*Decode)(const Codes&, const uint8_t* panel, int64_t start, int64_t depth, void* out);

template <bool PAIRED>
static Decode decode_of(const Codes& codes) {
    constexpr Decode ALL[5][2] = {{decode<PAIRED, INT8, false>, decode<PAIRED, INT8, true>},
                                  {decode<PAIRED, FP8, false>, decode<PAIRED, FP8, true>},
                                  {decode<PAIRED, INT4, false>, decode<PAIRED, INT4, true>},
                                  {decode<PAIRED, UINT4, false>, decode<PAIRED, UINT4, true>},
                                  {decode<PAIRED, FP4, false>, decode<PAIRED, FP4, true>}};
    return ALL[codes.code - INT8][codes.is_shifted];
}

#if defined(__AVX512BF16__)
constexpr int64_t FUSED_ROWS = 4;

// c[ROWS][PANEL] = a[ROWS][depth] b + the row `first`, as `tile` of pairs, which are CHAINED, of a panel of codes, whose
// factors stay in registers.
template <int ROWS, int64_t CODE, bool SHIFTED>
static void fused_tile(const Codes& codes, const uint8_t* panel, const uint32_t* a, int64_t a_stride, int64_t depth, float* c,
                       int64_t c_stride, const float* first) {
    constexpr int64_t UNIT_BYTES = UNIT * PANEL * bits_of(CODE) / 8, UNITS = 2 * DEPTH_WORDS / UNIT;
    const uint8_t *unit = panel, *next = panel;
    vec scale[4], offset[4];
    for (int64_t start = 0, left = 0; start < depth; start += DEPTH_WORDS) {
        vec even[ROWS][2] = {}, odd[ROWS][2] = {};
        for (int64_t k = 0, stop; k < UNITS; left -= stop - k, k = stop) {
            if (left == 0) {
                spread<true>((const float*)next, scale, factor_of(CODE));
                if (SHIFTED) spread<true>((const float*)next + PANEL, offset);
                unit = next + codes.header, next += codes.bytes, left = codes.group / UNIT;
            }
            stop = std::min(UNITS, k + left);
            for (int64_t u = k; u < stop; u++, unit += UNIT_BYTES) {
                const auto value = [&](int v) __attribute__((always_inline)) {
                    const vec scaled = numbers<CODE>(unit, v) * scale[v % 4];
                    return SHIFTED ? scaled + offset[v % 4] : scaled;
                };
                ask_unit<UNIT_BYTES>(unit);
                const words b[4] = {pairs(value(0), value(1)), pairs(value(2), value(3)), pairs(value(4), value(5)),
                                    pairs(value(6), value(7))};
                for (int r = 0; r < ROWS; r++) {
                    const words x = splat(a[r * a_stride + start + u]), z = splat(a[r * a_stride + start + UNITS + u]);
                    for (int n = 0; n < 2; n++) {
                        even[r][n] = fused(x, b[n], even[r][n]);
                        odd[r][n] = fused(z, b[2 + n], odd[r][n]);
                    }
                }
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < 2; n++) {
                float* const to = c + r * c_stride + n * LANES;
                store(to, load(start ? to : first + n * LANES) + (even[r][n] + odd[r][n]));
            }
    }
}

typedef void (*FusedTile)(const Codes&, const uint8_t* panel, const uint32_t* a, int64_t a_stride, int64_t depth, float* c,
                          int64_t c_stride, const float* first);

template <int64_t CODE, bool SHIFTED>
constexpr FusedTile FUSED[FUSED_ROWS] = {fused_tile<1, CODE, SHIFTED>, fused_tile<2, CODE, SHIFTED>,
                                         fused_tile<3, CODE, SHIFTED>, fused_tile<4, CODE, SHIFTED>};

static FusedTile fused_tile_of(const Codes& codes, int64_t rows) {
    const FusedTile* const all[5][2] = {{FUSED<INT8, false>, FUSED<INT8, true>},   {FUSED<FP8, false>, FUSED<FP8, true>},
                                        {FUSED<INT4, false>, FUSED<INT4, true>},   {FUSED<UINT4, false>, FUSED<UINT4, true>},
                                        {FUSED<FP4, false>, FUSED<FP4, true>}};
    return all[codes.code - INT8][codes.is_shifted][rows - 1];
}
#endif
