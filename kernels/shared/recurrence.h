// What gated_delta and mamba2 share: strips of recurrent states, and where the states of a row of tokens lie.
#pragma once
#include "cpu.h"

// Elements of states: float, or the bits of bfloat16, to which a state is rounded after each token.
typedef uint16_t bits16 __attribute__((vector_size(LANES * 2)));

static inline vec widen(bits16 bits) {
#if defined(__AVX512F__)  // the compiler makes it of two halves
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#else
    return (vec)(__builtin_convertvector(bits, words) << 16);
#endif
}

static inline bits16 narrow(vec x) {
#if defined(__AVX512BF16__)
    return (bits16)_mm512_cvtneps_pbh((__m512)x);
#else
    bits16 bits;
    for (int l = 0; l < LANES; l++) bits[l] = to_bfloat16(x[l]);
    return bits;
#endif
}

static inline vec load(const uint16_t* p) {
    bits16 bits;
    std::memcpy(&bits, p, sizeof bits);
    return widen(bits);
}

static inline void store(uint16_t* p, vec x) {
    const bits16 bits = narrow(x);
    std::memcpy(p, &bits, sizeof bits);
}

// What a state of T keeps of x.
template <typename T>
static inline vec rounded(vec x) {
    if constexpr (std::is_same_v<T, float>) return x;
    else return widen(narrow(x));
}

// VECS vectors of columns of a state [key_dim][value_dim], in a slot or in scratch. WHOLE, or `columns` of them.
template <int VECS, bool WHOLE, typename T>
struct Strip {
    static constexpr int64_t WIDTH = VECS * LANES;
    T* first;
    int64_t row;  // elements from row to row, or 0: the same one
    int64_t columns;

    template <typename E>
    static void get(const E* from, vec* to, int64_t columns) {
        E part[WHOLE ? 1 : WIDTH];
        if constexpr (!WHOLE) std::fill(std::copy_n(from, columns, part), part + WIDTH, E{}), from = part;
        for (int n = 0; n < VECS; n++) to[n] = load(from + n * LANES);
    }
    template <typename E>
    static void put(const vec* from, E* to, int64_t columns) {
        E part[WHOLE ? 1 : WIDTH], *const all = WHOLE ? to : part;
        for (int n = 0; n < VECS; n++) store(all + n * LANES, from[n]);
        if constexpr (!WHOLE) std::copy_n(part, columns, to);
    }
    void get(int64_t i, vec* to) const { get(first + i * row, to, columns); }
    void put(int64_t i, const vec* from) const { put(from, first + i * row, columns); }
};

// A row of tokens of one head, over its states in slots `slot` elements apart from `state` on.
template <typename T>
struct Row {
    T* state;
    int64_t slot, key_dim, value_dim;
    int64_t begin, end;     // its tokens
    int32_t read;           // slot, or -1: zeros
    const int32_t* writes;  // [kept]: slots for the states after the last `kept` tokens, -1 for none
    int64_t kept;
    int64_t length, round;  // tokens of its sequence up to `end`; of those a state is rounded at each multiple, 0: none

    bool rounds(int64_t t) const { return round && (length - (end - 1 - t)) % round == 0; }
    int32_t write(int64_t t) const { return end - t <= kept ? writes[kept - (end - t)] : -1; }
    template <typename Place>
    Place in_slot(int32_t index, int64_t start) const {
        return {state + index * slot + start, value_dim, value_dim - start};
    }
    template <int VECS, bool WHOLE>
    Strip<VECS, WHOLE, T> before(int64_t start) const {
        typedef Strip<VECS, WHOLE, T> Place;
        static T zeros[VECS * LANES];
        return read < 0 ? Place{zeros, 0, value_dim - start} : in_slot<Place>(read, start);
    }
    // Scratch, of floats, that stays in L1 while the tokens of the row pass.
    template <int VECS, bool WHOLE>
    Strip<VECS, WHOLE, float> scratch(int64_t start) const {
        static thread_local std::vector<float> held;
        return {lined(held, key_dim * VECS * LANES), VECS * LANES, value_dim - start};
    }
};

// run(strip, start) for the strips of the states that `row` begins with: wide ones for a single token, so that it reads
// and writes whole rows.
template <int VECS, int WIDE_VECS, typename T, typename Run>
static inline void each_strip(const Row<T>& row, Run run) {
    int64_t start = 0;
    if (row.end - row.begin == 1 && row.value_dim % (WIDE_VECS * LANES) == 0)
        for (; start < row.value_dim; start += WIDE_VECS * LANES) run(row.template before<WIDE_VECS, true>(start), start);
    for (; start + VECS * LANES <= row.value_dim; start += VECS * LANES) run(row.template before<VECS, true>(start), start);
    if (start < row.value_dim) run(row.template before<VECS, false>(start), start);
}
