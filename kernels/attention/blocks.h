// Blocks of keys and values: where they lie in pages, packed into panels for a product, and the softmax that folds their
// scores in.
#pragma once
#include "../shared/fp8.h"

namespace {
const float ZEROS[128] = {};              // what scores start as
constexpr float LOWEST = -1e30f;      // below any score, and finite: it may be taken from itself

// E is the type of the factors of a product: float, or uint32_t for a word of two bfloat16.
template <typename E>
constexpr bool PAIRED = std::is_same_v<E, uint32_t>;

// Keys. Part of what the bits are, as all sums run block by block.
template <typename E>
constexpr int64_t BLOCK = PAIRED<E> ? 128 : 64;

// Queries of one product with keys.
template <typename E>
constexpr int64_t QUERY_ROWS = PAIRED<E> ? 32 : TILE_ROWS;

constexpr int64_t STEP = 32;  // keys of a block that are left out together: panels of keys, blocks of depth of values

// The length in E of a row of `elements`.
template <typename E>
constexpr int64_t words_of(int64_t elements) {
    return PAIRED<E> ? block_words(elements) : elements;
}

struct Cache {  // [pages][kv_heads][K|V][page_tokens][dim], strides in bytes
    const char* data;
    int64_t page, head, kv, token, half_width, page_tokens;
};

// Scores are exponents of e, those of pairs of 2.
template <typename E>
constexpr float LOG_E = PAIRED<E> ? 1.44269504f : 1.0f;

// The weight of a score beside the highest one, which is finite: 0 of -infinity.
template <typename E>
inline vec weight_of(vec score, vec highest) {
    if constexpr (PAIRED<E>) return exp2_f32(score - highest);
    return score == -INFINITY ? vec{} : exp_f32<false>(score - highest);
}

struct Seen {  // by each query: `window` keys, and the sink of its head, or null
    int64_t window;
    const float* sinks;

    template <typename E>
    float sink(int64_t head) const { return sinks ? std::max(LOWEST, sinks[head] * LOG_E<E>) : LOWEST; }
};

struct Task {
    int64_t row, begin, end;  // tokens [begin, end) of the batch
    int64_t position;         // of token `begin` in its sequence

    // Of the keys that it sees.
    int64_t first(const Seen& seen) const { return std::max<int64_t>(0, position - seen.window + 1); }
    int64_t last() const { return position + end - begin; }
};

struct Call {  // what its tasks share; q and out [tokens][kv_heads][group][dim]
    const float* q;
    Cache cache;
    Scales scales;  // of codes, which are decoded block by block
    Seen seen;
    float* out;
    int64_t kv_heads, group, dim;
    float scale;

    // Where query i of a task is in q and in out: head i % group, of `head`, of token i / group.
    int64_t place(const Task& task, int64_t head, int64_t i) const {
        return (((task.begin + i / group) * kv_heads + head) * group + i % group) * dim;
    }
};

#if defined(__AVX2__)
// LANES rows of words become columns: squares beside the diagonal change places, of half the width, a quarter, and on.
template <int HALF = LANES / 2>
__attribute__((always_inline)) inline void transpose(words rows[LANES]) {
    words low, high;
    for (int l = 0; l < LANES; l++) {
        low[l] = l & HALF ? LANES + l - HALF : l;
        high[l] = l & HALF ? LANES + l : l + HALF;
    }
    for (int i = 0; i < LANES; i++) {
        if (i & HALF) continue;
        const words upper = rows[i], lower = rows[i + HALF];
        rows[i] = __builtin_shuffle(upper, lower, low);
        rows[i + HALF] = __builtin_shuffle(upper, lower, high);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}
#else
inline void transpose(words rows[LANES]) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const uint32_t word = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = word;
        }
}
#endif

// A row of a key or a value as floats.
void widen(const char* from, bool half_width, int64_t dim, float* to) {
    if (!half_width) {
        std::memcpy(to, from, dim * sizeof(float));
        return;
    }
    for (int64_t e = 0; e < dim; e++) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * e, sizeof bits);
        to[e] = __builtin_bit_cast(float, (uint32_t)bits << 16);
    }
}

constexpr int64_t DIM_MAX = 1024;

// A row of keys as words of E: of the page itself where it has them, else of `room`.
template <typename E>
const char* key_words(const char* key, bool half_width, int64_t dim, E* room) {
    if (half_width && PAIRED<E> && dim == 2 * words_of<E>(dim)) return key;
    if (!half_width && !PAIRED<E>) return key;
    if constexpr (!PAIRED<E>) {
        widen(key, half_width, dim, room);
    } else {
        float wide[DIM_MAX];
        widen(key, half_width, dim, wide);
        to_words(wide, dim, room);
    }
    return (const char*)room;
}

// LANES keys as columns of a panel [words_of(dim)][PANEL]. Prefetches as many of `next`.
template <typename E>
void gather_keys(const char* const* keys, const char* const* next, bool half_width, int64_t dim, E* columns, E* room) {
    const int64_t count = words_of<E>(dim);
    const char* rows[LANES];
    for (int j = 0; j < LANES; j++) rows[j] = key_words(keys[j], half_width, dim, room + j * count);
    int64_t w = 0;
    for (; w + LANES <= count; w += LANES) {
        words square[LANES];
        for (int j = 0; j < LANES; j++) {
            __builtin_prefetch(next[j] + w * 4, 0, 2);
            std::memcpy(&square[j], rows[j] + w * 4, sizeof square[j]);
        }
        transpose(square);
#if defined(__AVX512BF16__)
        for (int i = 0; PAIRED<E> && CHAINED && i < LANES; i += 2) chain(square[i], square[i + 1]);
#endif
        for (int i = 0; i < LANES; i++) std::memcpy(columns + (w + i) * PANEL, &square[i], sizeof square[i]);
    }
    for (; w < count; w++)
        for (int j = 0; j < LANES; j++) std::memcpy(columns + w * PANEL + j, rows[j] + w * 4, 4);
}

// A value as row `at` of panels [dim / PANEL][BLOCK][PANEL].
void put_value(const char* value, bool half_width, int64_t dim, int64_t at, float* values) {
    for (int64_t p = 0; p < dim; p += PANEL)
        widen(value + p * (half_width ? 2 : 4), half_width, std::min<int64_t>(PANEL, dim - p),
              values + p * BLOCK<float> + at * PANEL);
}

// PANEL elements of a value as bfloat16; zeros behind the last.
typedef uint16_t halves __attribute__((vector_size(PANEL * 2)));

inline __attribute__((always_inline)) halves panel_of(const char* value, bool half_width, int64_t dim, int64_t p) {
    halves found{};
    if (!value) return found;
    const int64_t count = std::min<int64_t>(PANEL, dim - p);
    if (half_width && count == PANEL) {
        std::memcpy(&found, value + 2 * p, sizeof found);
    } else if (half_width) {
        std::memcpy(&found, value + 2 * p, 2 * count);
    } else {
        float wide[PANEL] = {};
        uint32_t rounded[PANEL / 2];
        std::memcpy(wide, value + 4 * p, 4 * count);
        to_pairs(wide, PANEL, rounded);
        std::memcpy(&found, rounded, sizeof found);
    }
    return found;
}

inline halves whole_panel(const char* value, int64_t p) {
    halves found;
    std::memcpy(&found, value + 2 * p, sizeof found);
    return found;
}

// Two values, each may be null, as the halves of row `at` of panels [dim / PANEL][BLOCK / 2][PANEL] of words. WHOLE: both
// are there, in bfloat16 and whole panels.
template <bool WHOLE>
inline __attribute__((always_inline)) void put_values(const char* low, const char* high, bool half_width, int64_t dim,
                                                      int64_t at, uint32_t* values) {
    halves first, second;
    for (int l = 0; l < PANEL; l++) {
        first[l] = l / 2 + (l % 2) * PANEL;
        second[l] = first[l] + PANEL / 2;
    }
    for (int64_t p = 0; p < dim; p += PANEL) {
        const halves a = WHOLE ? whole_panel(low, p) : panel_of(low, half_width, dim, p);
        const halves b = WHOLE ? whole_panel(high, p) : panel_of(high, half_width, dim, p);
        uint32_t* to = values + p * (BLOCK<uint32_t> / 2) + at * PANEL;
        const halves left = __builtin_shuffle(a, b, first), right = __builtin_shuffle(a, b, second);
        std::memcpy(to, &left, sizeof left);
        std::memcpy(to + LANES, &right, sizeof right);
    }
}

// Where keys start + [from, to) of a head lie. Before them one of these is repeated; behind them lie those of `after`, the
// first block of another task, which may be read and are worth fetching.
template <typename E>
struct Block {
    static constexpr int64_t SIZE = BLOCK<E>;
    const char* rows[SIZE];
    int64_t from, to;

    void find(const Cache& cache, const int32_t* table, int64_t head, int64_t start, int64_t first, int64_t last,
              const Block* after) {
        from = std::max<int64_t>(0, first - start), to = std::min(SIZE, last - start);
        for (int64_t j = from; j < to;) {
            const int64_t page = (start + j) / cache.page_tokens, slot = (start + j) % cache.page_tokens;
            const char* at = cache.data + table[page] * cache.page + head * cache.head + slot * cache.token;
            const int64_t end = std::min(to, j + cache.page_tokens - slot);
            for (; j < end; j++, at += cache.token) rows[j] = at;
        }
        const char* const any = from < to ? rows[from] : cache.data;
        const int64_t behind = std::max<int64_t>(0, to);
        std::fill(rows, rows + from, any);
        if (after) std::copy(after->rows + behind, after->rows + SIZE, rows + behind);
        else std::fill(rows + behind, rows + SIZE, any);
    }
};

// The keys and values of a block of codes as bfloat16, where they lie as in a page of one head: every product has the
// bits of such pages.
template <typename E>
struct Decoded {
    Cache cache;
    Block<E> block;

    Decoded(const Cache& codes, int64_t dim, bool coded) : cache(codes) {
        if (!coded) return;
        static thread_local std::vector<uint16_t> room;
        uint16_t* const data = lined(room, 2 * BLOCK<E> * dim);
        cache.data = (const char*)data, cache.token = 2 * dim, cache.half_width = 1, cache.page_tokens = BLOCK<E>;
        cache.kv = codes.kv ? BLOCK<E> * cache.token : 0;
        for (int64_t j = 0; j < BLOCK<E>; j++) block.rows[j] = cache.data + j * cache.token;
    }

    // Prefetches what it reads in the block that is next.
    void decode(const Cache& codes, const Scales& scales, const int32_t* table, int64_t head, int64_t start,
                const Block<E>& from, const Block<E>& next, int64_t dim) {
        block.from = from.from, block.to = from.to;
        for (int64_t j = from.from; j < from.to; j++) {
            const int64_t page = table[(start + j) / codes.page_tokens], slot = (start + j) % codes.page_tokens;
            const uint8_t* const scale = scales.at(page, head, slot);
            for (int64_t at = 0; at < dim; at += LINE) __builtin_prefetch(next.rows[j] + at, 0, 2);
            ::decode((const uint8_t*)from.rows[j], *scale, dim, (uint16_t*)block.rows[j]);
            if (!codes.kv) continue;
            for (int64_t at = 0; at < dim; at += LINE) __builtin_prefetch(next.rows[j] + codes.kv + at, 0, 2);
            ::decode((const uint8_t*)from.rows[j] + codes.kv, scale[scales.kv], dim,
                     (uint16_t*)(block.rows[j] + cache.kv));
        }
    }
};

// Keys as columns of panels [BLOCK / PANEL][words_of(dim)][PANEL]. Columns beside those of the block are of any keys: their
// scores are not read. Prefetches what it reads in the block that is next.
template <typename E>
void gather_keys(const Cache& cache, const Block<E>& block, const Block<E>& next, int64_t dim, E* keys, E* room) {
    for (int64_t j = block.from / LANES * LANES; j < block.to; j += LANES)
        gather_keys(block.rows + j, next.rows + j, cache.half_width, dim,
                    keys + j / PANEL * words_of<E>(dim) * PANEL + j % PANEL, room);
}

// Values as rows of panels. Prefetches as well.
template <typename E>
void gather_values(const Cache& cache, const Block<E>& block, const Block<E>& next, int64_t dim, E* values) {
    const int64_t from = block.from, to = block.to;
    const auto value = [&](int64_t j) { return j < from || j >= to ? nullptr : block.rows[j] + cache.kv; };
    const auto ask_next = [&](int64_t j) {
        for (int64_t at = 0; at < dim * (cache.half_width ? 2 : 4); at += LINE)
            __builtin_prefetch(next.rows[j] + cache.kv + at, 0, 2);
    };
    if constexpr (!PAIRED<E>) {
        for (int64_t j = from; j < to; j++) {
            ask_next(j);
            put_value(value(j), cache.half_width, dim, j, values);
        }
    } else {
        for (int64_t w = from / 4 * 2; w < words_of<E>(to); w++) {
            const int64_t low = CHAINED ? w / 2 * 4 + 2 + w % 2 : 2 * w, high = CHAINED ? low - 2 : low + 1;
            ask_next(low), ask_next(high);
            if (std::min(low, high) >= from && std::max(low, high) < to && cache.half_width && dim % PANEL == 0) {
                put_values<true>(value(low), value(high), true, dim, w, values);
            } else {
                put_values<false>(value(low), value(high), cache.half_width, dim, w, values);
            }
        }
    }
}

// Calls run(constant) for a number that is at most MOST.
template <int MOST, typename Run>
void with_constant(int64_t number, Run run) {
    if constexpr (MOST > 1) {
        if (number < MOST) return with_constant<MOST - 1>(number, run);
    }
    run(std::integral_constant<int, MOST>{});
}
// A vector of COUNT reduced ones: lane r is that of rows[r], by halves, as `tree`.
template <int COUNT, int HALF = LANES / 2, typename Combine>
vec trees(vec* rows, Combine combine) {
    // Each pair of rows becomes one, of which the lanes that have bit HALF are of the second; a row alone is its own second.
    constexpr int LEFT = std::max(1, COUNT / 2);
    ints first, second;
    for (int l = 0; l < LANES; l++) {
        first[l] = l & HALF ? LANES + l - HALF : l;
        second[l] = l & HALF ? LANES + l : l + HALF;
    }
    for (int r = 0; r < LEFT; r++) {
        const vec a = rows[r], b = rows[COUNT > 1 ? r + LEFT : r];
        rows[r] = combine(__builtin_shuffle(a, b, first), __builtin_shuffle(a, b, second));
    }
    if constexpr (HALF > 1) return trees<LEFT, HALF / 2>(rows, combine);
    return rows[0];
}

// Which scores of a query count: those of keys [from, to) of the block.
struct Range {
    int64_t from, to;
};

// At most MOST rows of scores of keys [begin, end) of a block become weights in P: floats, or pairs of bfloat16, `chained` as
// a product takes them. `shrink` gets LANES factors by which what was summed before shrinks: exactly 1 where no key counts.
template <int MOST, typename E>
void fold_scores(const float* S, const Range* ranges, int64_t rows, int64_t begin, int64_t end, bool chained, E* P,
                 float* highest, float* total, float* shrink) {
    constexpr int64_t SIZE = BLOCK<E>, PARTS = LANES_SUM / LANES, VECS = STEP / LANES;
    ints lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    // STEP scores of a row from key j on; -infinity in place of those that do not count.
    const auto get = [&](int64_t r, int64_t j, vec* scores) {
        const Range range = ranges[r];
        for (int64_t i = 0; i < VECS; i++) scores[i] = load(S + r * SIZE + j + i * LANES);
        if (range.from <= j && j + STEP <= range.to) return;
        for (int64_t i = 0; i < VECS; i++) {
            const ints key = lane + (int32_t)(j + i * LANES);
            scores[i] = (key >= (int32_t)range.from) & (key < (int32_t)range.to) ? scores[i] : vec{} - INFINITY;
        }
    };
    vec reduced[MOST], scores[VECS];
    ints own;  // the lane in which `trees` has a row
    for (int l = 0; l < LANES; l++) own[l] = l % MOST * (LANES / MOST);
    const auto of_rows = [&](auto combine) { return __builtin_shuffle(trees<MOST>(reduced, combine), own); };
    for (int64_t r = 0; r < MOST; r++) {
        vec most = vec{} - INFINITY;
        for (int64_t j = begin; r < rows && j < end; j += STEP) {
            get(r, j, scores);
            for (int64_t i = 0; i < VECS; i++) most = at_least(most, scores[i]);
        }
        reduced[r] = most;
    }
    const vec before = load(highest), peaks = at_least(before, of_rows([](vec a, vec b) { return at_least(a, b); }));
    store(highest, peaks);
    for (int64_t r = 0; r < MOST; r++) {
        const vec peak = splat(highest[r]);
        vec sums[PARTS] = {};
        for (int64_t j = begin; r < rows && j < end; j += STEP) {
            get(r, j, scores);
            for (int64_t i = 0; i < VECS; i++) {
                scores[i] = weight_of<E>(scores[i], peak);
                sums[i % PARTS] += scores[i];
            }
            if constexpr (PAIRED<E>) {
                uint32_t* const to = P + (r * SIZE + j) / 2;
                to_pairs((const float*)scores, STEP, to);
                if (chained) chain_words(to, STEP / 2);
            } else {
                std::memcpy(P + r * SIZE + j, scores, sizeof scores);
            }
        }
        for (int64_t part = 1; part < PARTS; part++) sums[0] += sums[part];
        reduced[r] = sums[0];
    }
    const vec factor = peaks == before ? vec{} + 1.0f : weight_of<E>(before, peaks);
    store(shrink, factor);
    store(total, load(total) * factor + of_rows([](vec a, vec b) { return a + b; }));
}
}  // namespace
