// Codes of e4m3: a number is a code times 2^(scale - 127). fp8.py is the definition.
#pragma once
#include "cpu.h"

namespace {
constexpr int SCALE_MIN = 16, SCALE_MAX = 246, E4M3_BIAS = 7, FLOAT_BIAS = 127;

struct Scales {  // [pages][kv_heads][K|V][page_tokens], strides in bytes, those of a layer 0; no data: no scales
    uint8_t* data;
    int64_t page, head, kv, token;

    uint8_t* at(int64_t page, int64_t head, int64_t slot) const {
        return data + page * this->page + head * this->head + slot * token;
    }
};

// The least scale with which no code of x is beyond the largest.
inline uint8_t scale_of(const float* x, int64_t dim) {
    uint32_t highest = 0;
    for (int64_t e = 0; e < dim; e++) highest = std::max(highest, __builtin_bit_cast(uint32_t, x[e]) & 0x7fffffffu);
    return std::clamp((int)((highest + 0x1fffff) >> 23) - 8, SCALE_MIN, SCALE_MAX);
}

// The nearest codes, ties to even; what is beyond the largest becomes it, and NaN stays NaN.
inline void encode(const float* x, int64_t dim, uint8_t scale, uint8_t* codes) {
    constexpr uint32_t LEAST_NORMAL = 0x3c800000, LARGEST = 0x7e, NAN_CODE = 0x7f;
    constexpr float UNITS = 0x1p14f;  // a sum with it is rounded to units of the least code
    const float inverse = __builtin_bit_cast(float, (uint32_t)(2 * FLOAT_BIAS - scale) << 23);
    for (int64_t e = 0; e < dim; e++) {
        const uint32_t bits = __builtin_bit_cast(uint32_t, x[e] * inverse), size = bits & 0x7fffffffu;
        const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - ((FLOAT_BIAS - E4M3_BIAS) << 3);
        const uint32_t units = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, size) + UNITS);
        uint32_t code = size < LEAST_NORMAL ? units - __builtin_bit_cast(uint32_t, UNITS) : std::min(normal, LARGEST);
        code = size > 0x7f800000u ? NAN_CODE : code;
        codes[e] = code | (bits >> 24 & 0x80u);
    }
}

typedef uint8_t code_lanes __attribute__((vector_size(PANEL)));
typedef uint16_t number_lanes __attribute__((vector_size(PANEL * 2)));

constexpr uint16_t half_bits(int units) {  // of units of the least code, 2^-9, without the scale
    const int shift = units >= 4 ? 2 : units >= 2 ? 1 : 0;
    return units ? (shift - 9) * 128 + (units << (7 - shift)) - 128 : 0;
}

alignas(LINE) constexpr uint16_t DENORMAL_CODES[PANEL] = {half_bits(0), half_bits(1), half_bits(2), half_bits(3),
                                                          half_bits(4), half_bits(5), half_bits(6), half_bits(7)};
alignas(LINE) constexpr uint16_t OF_SCALE[PANEL] = {0, 128, 128, 128, 128, 128, 128, 128};

// PANEL codes become bfloat16.
__attribute__((always_inline)) inline number_lanes decode_lanes(code_lanes codes, uint8_t scale) {
    number_lanes denormal, of_scale;
    std::memcpy(&denormal, DENORMAL_CODES, sizeof denormal);
    std::memcpy(&of_scale, OF_SCALE, sizeof of_scale);
    denormal += of_scale * (uint16_t)scale;
    const number_lanes code = __builtin_convertvector(codes, number_lanes), size = code & 0x7f;
    number_lanes found = (size << 4) + (uint16_t)((scale - E4M3_BIAS) << 7);
    found = size < 8 ? __builtin_shuffle(denormal, size & (PANEL - 1)) : found;
    found = size == 0x7f ? number_lanes{} + 0x7fc0 : found;
    return found | (code & 0x80) << 8;
}

__attribute__((always_inline)) inline number_lanes decode_lanes(const uint8_t* codes, uint8_t scale) {
    code_lanes packed;
    std::memcpy(&packed, codes, sizeof packed);
    return decode_lanes(packed, scale);
}

inline void decode(const uint8_t* codes, uint8_t scale, int64_t dim, uint16_t* to) {
    int64_t e = 0;
    for (; e + PANEL <= dim; e += PANEL) {
        const number_lanes found = decode_lanes(codes + e, scale);
        std::memcpy(to + e, &found, sizeof found);
    }
    if (e == dim) return;
    code_lanes rest{};
    std::memcpy(&rest, codes + e, dim - e);
    const number_lanes found = decode_lanes(rest, scale);
    std::memcpy(to + e, &found, 2 * (dim - e));
}
}  // namespace
