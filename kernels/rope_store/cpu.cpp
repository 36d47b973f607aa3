// Norm and rotary embedding of q and k, and the store of k and v into their pages.
#include "../shared/cpu.h"
#include "../shared/fp8.h"
#include "../shared/ranges.h"

namespace {
// Rounded to the nearest, ties to even; NaN stays NaN. The upper half of a word is zero.
template <typename T>
T bf16(T bits) {
    const T nan = (T{} + 0x7fc0u), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

// y = rotate(x / rms(x) * weight), of x as it is where weight is null; angles hold cos [half], then sin [half]; element i turns with element i + half.
void norm_rotate(const float* x, const float* weight, const float* angles, float* y, int64_t dim, int64_t half,
                 float epsilon) {
    const float scale = weight ? 1.0f / std::sqrt(dot(x, x, dim) / dim + epsilon) : 1.0f;
    const auto normed = [=](auto lane, int64_t i) {
        typedef decltype(lane) T;
        return weight ? load_as<T>(x + i) * scale * load_as<T>(weight + i) : load_as<T>(x + i);
    };
    by_vectors(half, [=](auto lane, int64_t i) {
        typedef decltype(lane) T;
        const T low = normed(lane, i), high = normed(lane, i + half);
        const T c = load_as<T>(angles + i), s = load_as<T>(angles + half + i);
        store(y + i, low * c - high * s);
        store(y + i + half, high * c + low * s);
    });
    by_vectors(dim - 2 * half, [=](auto lane, int64_t i) { store(y + 2 * half + i, normed(lane, 2 * half + i)); });
}

void put_codes(const float* x, char* at, int64_t dim, uint8_t* scale, bool fixed) {
    if (!fixed) *scale = scale_of(x, dim);
    encode(x, dim, *scale, (uint8_t*)at);
}

void put(const float* x, char* at, int64_t dim, bool half_width) {
    if (!half_width) {
        std::memcpy(at, x, dim * sizeof(float));
        return;
    }
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        const halves bits = __builtin_convertvector(bf16((words)load(x + i)), halves);
        std::memcpy(at + 2 * i, &bits, sizeof bits);
    }
    for (; i < dim; i++) {
        const uint16_t bits = bf16(__builtin_bit_cast(uint32_t, x[i]));
        std::memcpy(at + 2 * i, &bits, sizeof bits);
    }
}

// Asks for the lines of `bytes` that are written soon.
void ask_for(const char* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(at + i, 1);
}
}  // namespace

// angles [tokens][cos | sin][half]. libm's scalar cosf and sinf: one code path whatever the number of tokens.
extern "C" void rope_angles(const int64_t* positions, const float* frequencies, float* angles, int64_t tokens,
                            int64_t half) {
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)positions[t] * frequencies[i];
            angles[(2 * t) * half + i] = std::cos(angle);
            angles[(2 * t + 1) * half + i] = std::sin(angle);
        }
    }
}

// q [tokens][q_heads][dim] by strides; k and v [tokens][kv_heads][dim], heads packed; q_out packed; v and the
// weights of norms may be null. The cache is [pages][kv_heads][K|V][page_tokens][dim] by strides in bytes, of float32 (kind
// 0), bfloat16 (1) or codes with scales (2), which are written unless they are fixed.
extern "C" void rope_store(const float* q, int64_t q_token, int64_t q_head, const float* k, int64_t k_token,
                           const float* v, int64_t v_token, const float* q_weight, const float* k_weight,
                           const float* angles, float* q_out, char* cache, int64_t num_pages, int64_t page_stride,
                           int64_t head_stride, int64_t kv_stride, int64_t token_stride, int64_t kind, uint8_t* scales,
                           int64_t scales_page, int64_t scales_head, int64_t scales_kv, int64_t scales_token,
                           int64_t page_tokens, const int32_t* table, int64_t table_row, int64_t table_width,
                           const int32_t* cu, const int32_t* lens, int64_t rows, int64_t tokens, int64_t q_heads,
                           int64_t kv_heads, int64_t dim, int64_t half, float epsilon) {
    assert_pages("rope_store", table, table_row, table_width, cu, lens, rows, tokens, page_tokens, num_pages, 1);
    const Scales lie{scales, scales_page, scales_head, scales_kv, scales_token};
    const bool fixed = !scales_page;
    for (int64_t b = 0; b < rows; b++) {
#pragma omp parallel for if ((cu[b + 1] - cu[b]) * q_heads * dim >= 1 << 15)
        for (int64_t t = cu[b]; t < cu[b + 1]; t++) {
            const int64_t position = lens[b] - (cu[b + 1] - t);
            const float* angle = angles + 2 * t * half;
            const int64_t page = position < 0 ? 0 : table[b * table_row + position / page_tokens];
            char* const token = cache + page * page_stride + position % page_tokens * token_stride;
            for (int64_t h = 0; h < kv_heads && position >= 0; h++) {
                ask_for(token + h * head_stride, token_stride);
                if (v) ask_for(token + h * head_stride + kv_stride, token_stride);
            }
            for (int64_t h = 0; h < q_heads; h++)
                norm_rotate(q + t * q_token + h * q_head, q_weight, angle, q_out + (t * q_heads + h) * dim, dim, half,
                            epsilon);
            if (position < 0) continue;  // the padding of a batch
            static thread_local std::vector<float> turned;
            turned.resize(dim);
            for (int64_t h = 0; h < kv_heads; h++) {
                char* const at = token + h * head_stride;
                norm_rotate(k + t * k_token + h * dim, k_weight, angle, turned.data(), dim, half, epsilon);
                const float* const value = v ? v + t * v_token + h * dim : nullptr;
                if (kind == 2) {
                    uint8_t* const scale = lie.at(page, h, position % page_tokens);
                    put_codes(turned.data(), at, dim, scale, fixed);
                    if (v) put_codes(value, at + kv_stride, dim, scale + lie.kv, fixed);
                    continue;
                }
                put(turned.data(), at, dim, kind == 1);
                if (v) put(value, at + kv_stride, dim, kind == 1);
            }
        }
    }
}
