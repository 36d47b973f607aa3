// What gated_delta and mamba2 share: strips of recurrent states, and where the states of a row of tokens lie.
#pragma once
#include "cpu.h"

// VECS vectors of columns of a state [key_dim][value_dim], in a slot or in scratch. WHOLE, or `columns` of them.
template <int VECS, bool WHOLE>
struct Strip {
    static constexpr int64_t WIDTH = VECS * LANES;
    float* first;
    int64_t row;  // floats from row to row, or 0: the same one
    int64_t columns;

    static void get(const float* from, vec* to, int64_t columns) {
        if constexpr (WHOLE) {
            for (int n = 0; n < VECS; n++) to[n] = load(from + n * LANES);
        } else {
            for (int n = 0; n < VECS; n++) to[n] = vec{};
            std::memcpy(to, from, columns * sizeof(float));
        }
    }
    static void put(const vec* from, float* to, int64_t columns) {
        if constexpr (WHOLE) {
            for (int n = 0; n < VECS; n++) store(to + n * LANES, from[n]);
        } else {
            std::memcpy(to, from, columns * sizeof(float));
        }
    }
    void get(int64_t i, vec* to) const { get(first + i * row, to, columns); }
    void put(int64_t i, const vec* from) const { put(from, first + i * row, columns); }
};

// A row of tokens of one head, over its states in slots `slot` floats apart from `state` on.
struct Row {
    float* state;
    int64_t slot, key_dim, value_dim;
    int64_t begin, end;     // its tokens
    int32_t read;           // slot, or -1: zeros
    const int32_t* writes;  // [kept]: slots for the states after the last `kept` tokens, -1 for none
    int64_t kept;

    int32_t write(int64_t t) const { return end - t <= kept ? writes[kept - (end - t)] : -1; }
    template <int VECS, bool WHOLE>
    Strip<VECS, WHOLE> in_slot(int32_t index, int64_t start) const {
        return {state + index * slot + start, value_dim, value_dim - start};
    }
    template <int VECS, bool WHOLE>
    Strip<VECS, WHOLE> before(int64_t start) const {
        static float zeros[VECS * LANES];
        return read < 0 ? Strip<VECS, WHOLE>{zeros, 0, value_dim - start} : in_slot<VECS, WHOLE>(read, start);
    }
    // Scratch that stays in L1 while the tokens of the row pass.
    template <int VECS, bool WHOLE>
    Strip<VECS, WHOLE> scratch(int64_t start) const {
        static thread_local std::vector<float> held;
        return {lined(held, key_dim * VECS * LANES), VECS * LANES, value_dim - start};
    }
};

// run(strip, start) for the strips of the states that `row` begins with: wide ones for a single token, so that it reads
// and writes whole rows.
template <int VECS, int WIDE_VECS, typename Run>
static inline void each_strip(const Row& row, Run run) {
    int64_t start = 0;
    if (row.end - row.begin == 1 && row.value_dim % (WIDE_VECS * LANES) == 0)
        for (; start < row.value_dim; start += WIDE_VECS * LANES) run(row.before<WIDE_VECS, true>(start), start);
    for (; start + VECS * LANES <= row.value_dim; start += VECS * LANES) run(row.before<VECS, true>(start), start);
    if (start < row.value_dim) run(row.before<VECS, false>(start), start);
}
