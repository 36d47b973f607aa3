// Paged causal attention: one kernel for decode, replay and prefill.
//
// Keys are taken in blocks aligned at position 0 of the sequence and folded in by online softmax, block after block.
// A query sees the same blocks in the same order whichever step, row or tile it is computed in, hence the same bits:
// a block of which it sees nothing, which is there for others of its tile, changes nothing of it.
#include <omp.h>

#include "../shared/cpu.h"

namespace {
constexpr int64_t TASK_QUERIES = 32 * 12;  // (token, head) pairs of one task: whole tiles of any machine
constexpr int64_t QUERIES_FACTOR = 4;      // as many times more for a long prompt: a task reads all its keys
constexpr int64_t TASK_FLOATS = 96 << 10;  // of their sums, which stay in L2
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

// For so few queries values are multiplied where they lie in pages: packing them takes longer.
constexpr int64_t MOST_WEIGHED = LANES == 16 ? 7 : 3;  // four sums of each fit the registers
constexpr int64_t FEW_KEYS = 64;  // of a block: AMX takes longer for them

// The floats of the lower halves of words, and those of the upper ones.
inline void to_halves(const uint32_t* pairs, int64_t count, float* low, float* high) {
    for (int64_t i = 0; i < count; i++) {
        low[i] = __builtin_bit_cast(float, pairs[i] << 16);
        high[i] = __builtin_bit_cast(float, pairs[i] & 0xffff0000u);
    }
}

// sums[ROWS][dim] += P V of keys [begin, end) of a block of bfloat16, begin a multiple of STEP, in the order of `multiply`.
// Prefetches the values of the block that is next.
template <int ROWS>
void weigh_values(const Block<uint32_t>& block, const Block<uint32_t>& next, int64_t kv, int64_t dim, const uint32_t* P,
                  int64_t begin, int64_t end, float* sums) {
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
                __builtin_prefetch(next.rows[j] + kv + 2 * p, 0, 2);
                const words value = load((const uint32_t*)(block.rows[j] + kv + 2 * p));
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
template <int ROWS>
void score_keys(const Block<uint32_t>& block, const Block<uint32_t>& next, int64_t depth, const float* factors,
                int64_t begin, int64_t end, float* S) {
    for (int64_t j = begin / LANES * LANES; j < end; j += LANES) {
        vec sums[ROWS] = {};
        for (int64_t start = 0; start < depth; start += DEPTH_WORDS) {
            for (int64_t i = j; i < j + LANES; i++) __builtin_prefetch(next.rows[i] + start * 4, 0, 2);
            vec even[ROWS] = {}, odd[ROWS] = {};
            for (int64_t w = start; w < start + DEPTH_WORDS; w += LANES) {
                words square[LANES];
                for (int l = 0; l < LANES; l++) square[l] = load((const uint32_t*)block.rows[j + l] + w);
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

// Calls run(constant) for a number that is at most MOST.
template <int MOST, typename Run>
void with_constant(int64_t number, Run run) {
    if constexpr (MOST > 1) {
        if (number < MOST) return with_constant<MOST - 1>(number, run);
    }
    run(std::integral_constant<int, MOST>{});
}

#if defined(AMX)
constexpr int64_t FEW_QUERIES = AMX_ROWS;  // for which keys are not packed

// Whether groups of AMX_ROWS keys lie in a page as rows of a register.
bool lie_in_rows(const Cache& cache, int64_t dim) {
    return HAS_AMX && cache.half_width && dim == 2 * block_words(dim) && cache.page_tokens % AMX_ROWS == 0;
}

// Q [queries][depth] as columns [depth][FEW_QUERIES], zeros beside them.
void to_columns(const uint32_t* Q, int64_t queries, int64_t depth, uint32_t* columns) {
    std::fill(columns, columns + depth * FEW_QUERIES, 0);
    for (int64_t i = 0; i < queries; i++)
        for (int64_t w = 0; w < depth; w++) columns[w * FEW_QUERIES + i] = Q[i * depth + w];
}

// The first columns, at most MOST, of a square become rows of S. What is not stored is not computed.
template <int64_t MOST>
void put_columns(const words* square, int64_t queries, float* S) {
    words rows[LANES];
    std::memcpy(rows, square, sizeof rows);
    transpose(rows);
    for (int64_t i = 0; i < MOST; i++)
        if (i < queries) std::memcpy(S + i * BLOCK<uint32_t>, &rows[i], sizeof rows[i]);
}

// S [queries][SIZE] of keys where they lie: keys are the rows of the product and queries its columns. Factors commute, so
// scores have the bits of packed keys. Those beside the block's are not read. Prefetches the block that is next.
__attribute__((target("amx-tile,amx-bf16"))) void score_in_pages(
        const Cache& cache, const Block<uint32_t>& block, const Block<uint32_t>& next, int64_t queries,
        const uint32_t* columns, int64_t depth, float* S) {
    AmxShapes shapes;  // registers 0 and 1 are of scores, 2 and 3 of keys, 4 of queries; all have a shape, as they must
    std::fill(shapes.rows, shapes.rows + 8, AMX_ROWS);
    shapes.set();
    const int64_t begin = block.from / AMX_ROWS * AMX_ROWS;
    words squares[BLOCK<uint32_t> / AMX_ROWS][LANES];  // of AMX_ROWS keys each: two at a time do not wait for each other
    const auto keys_of = [&](int64_t j) {
        const int64_t known = std::max(j, block.from);
        return block.rows[known] - (known - j) * cache.token;
    };
    for (int64_t j = begin; j < block.to; j += 2 * AMX_ROWS) {
        const bool two = j + AMX_ROWS < block.to;  // else one, twice
        const char *const keys = keys_of(j), *const others = two ? keys_of(j + AMX_ROWS) : keys;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t w = 0; w < depth; w += DEPTH_WORDS) {
            const int64_t asked = std::min(BLOCK<uint32_t>, j + 2 * AMX_ROWS);
            for (int64_t i = j; i < asked; i++) __builtin_prefetch(next.rows[i] + w * WORD, 0, 2);
            _tile_loadd(4, columns + w * FEW_QUERIES, FEW_QUERIES * WORD);
            _tile_loadd(2, keys + w * WORD, cache.token);
            _tile_loadd(3, others + w * WORD, cache.token);
            _tile_dpbf16ps(0, 2, 4);
            _tile_dpbf16ps(1, 3, 4);
        }
        words* const square = squares[(j - begin) / AMX_ROWS];
        _tile_stored(0, square, sizeof square[0]);
        _tile_stored(1, square + LANES, sizeof square[0]);
    }
    _tile_release();
    for (int64_t j = begin; j < block.to; j += AMX_ROWS) {
        words* const square = squares[(j - begin) / AMX_ROWS];
        queries <= 4 ? put_columns<4>(square, queries, S + j) : put_columns<LANES>(square, queries, S + j);
    }
}
#endif

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

#if defined(AMX)
// More queries of a KV head: keys are rows and queries columns of registers, as above, so a vector has a score, a maximum or
// a sum of each of 16 queries. A part is such a tile of queries with a block of keys. While the weights of a part are
// computed, AMX takes the scores of the next part and the values of the one before: AMX that was idle for a thousand cycles
// takes another thousand to start.
constexpr int64_t COLUMNS = AMX_ROWS;  // queries of a tile
constexpr int64_t KEYS = BLOCK<uint32_t>, STEPS = KEYS / STEP;
constexpr int64_t SLICES = LANES_SUM / 2;  // of the work of AMX: one for two of the interleaved sums of weights
constexpr int64_t TILE_DIM_MAX = 128;      // beyond, AMX waits for keys and values, which are loaded for each tile

struct Part {
    const Block<uint32_t>* block;
    const uint32_t *queries, *values;  // [depth][COLUMNS], and of `turn_values`
    float *sums, *highest, *total;     // [dim][COLUMNS], [COLUMNS], [COLUMNS]
    float* scores;                     // [KEYS][COLUMNS]
    uint32_t* weights;                 // [KEYS / 2][COLUMNS]
    int64_t begin, all_begin, all_end, end;  // steps [begin, end) have keys that are seen, [all_begin, all_end) no others
    ints from, to;                     // the keys that each query sees

    __mmask16 sees(int64_t key) const {
        const __m512i at = _mm512_set1_epi32((int32_t)key);
        return _mm512_cmple_epi32_mask((__m512i)from, at) & _mm512_cmpgt_epi32_mask((__m512i)to, at);
    }

    // `ends` are the tokens up to each query, from the start of the block, in ascending order.
    void see(ints ends, int64_t window) {
        const int32_t size = std::min<int64_t>(window, INT32_MAX / 2);
        const ints starts = ends - size, first = ints{} + (int32_t)block->from, last = ints{} + (int32_t)block->to;
        from = starts > first ? starts : first, to = ends < last ? ends : last;
        begin = from[0] / STEP, end = (to[COLUMNS - 1] + STEP - 1) / STEP;
        all_begin = std::min(end, (from[COLUMNS - 1] + STEP - 1) / STEP);
        all_end = std::max(all_begin, (int64_t)to[0] / STEP);
    }
};

// Values of a block as [STEPS][dim][DEPTH_WORDS]: rows of a dimension, of pairs of keys. Zeros in place of keys that the
// block has not. Prefetches those of the block that is next.
void turn_values(const Cache& cache, const Block<uint32_t>& block, const Block<uint32_t>& next, int64_t dim,
                 uint32_t* turned) {
    halves first, second;
    for (int l = 0; l < PANEL; l++) {
        first[l] = l / 2 + l % 2 * PANEL;
        second[l] = first[l] + PANEL / 2;
    }
    const auto value = [&](int64_t j, int64_t p) {
        __builtin_prefetch(next.rows[j] + cache.kv + 2 * p, 0, 2);
        return j >= block.from && j < block.to ? whole_panel(block.rows[j] + cache.kv, p) : halves{};
    };
    for (int64_t j = block.from / STEP * STEP; j < block.to; j += STEP)
        for (int64_t p = 0; p < dim; p += PANEL) {
            words low[LANES], high[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const halves even = value(j + 2 * i, p), odd = value(j + 2 * i + 1, p);
                low[i] = (words)__builtin_shuffle(even, odd, first);
                high[i] = (words)__builtin_shuffle(even, odd, second);
            }
            transpose(low);
            transpose(high);
            uint32_t* const to = turned + (j / STEP * dim + p) * DEPTH_WORDS;
            std::memcpy(to, low, sizeof low);
            std::memcpy(to + LANES * DEPTH_WORDS, high, sizeof high);
        }
}

// The scores of 16 keys, where they lie, by registers 4 to 6.
__attribute__((target("amx-tile,amx-bf16"), always_inline)) inline void score_slice(const Part& part, const Cache& cache,
                                                                                     int64_t depth, int64_t slice) {
    const Block<uint32_t>& block = *part.block;
    const int64_t j = slice * AMX_ROWS, known = std::max(j, block.from);
    if (j < part.begin * STEP || j + AMX_ROWS <= block.from || j >= std::min(part.end * STEP, block.to)) return;
    const char* const keys = block.rows[known] - (known - j) * cache.token;
    _tile_zero(4);
    for (int64_t w = 0; w < depth; w += DEPTH_WORDS) {
        _tile_loadd(5, part.queries + w * COLUMNS, COLUMNS * WORD);
        _tile_loadd(6, keys + w * WORD, cache.token);
        _tile_dpbf16ps(4, 6, 5);
    }
    _tile_stored(4, part.scores + j * COLUMNS, COLUMNS * WORD);
}

// A slice of values times weights, of pairs of 16 dimensions step after step, by registers 0 to 3 and 7.
__attribute__((target("amx-tile,amx-bf16"), always_inline)) inline void weigh_slice(const Part& part, int64_t dim,
                                                                                     int64_t slice) {
    constexpr int64_t REGISTER = AMX_ROWS * COLUMNS;
    const int64_t units = dim / PANEL * STEPS;
    for (int64_t u = slice * units / SLICES; u < (slice + 1) * units / SLICES; u++) {
        const int64_t d = u / STEPS * PANEL, s = u % STEPS;
        if (s < part.begin || s >= part.end) continue;
        float *const low = part.sums + d * COLUMNS, *const high = low + REGISTER;
        if (s == part.begin) {
            _tile_loadd(0, low, COLUMNS * WORD);
            _tile_loadd(1, high, COLUMNS * WORD);
        }
        const uint32_t* const values = part.values + (s * dim + d) * DEPTH_WORDS;
        _tile_loadd(2, part.weights + s * STEP / 2 * COLUMNS, COLUMNS * WORD);
        _tile_loadd(3, values, DEPTH_WORDS * WORD);
        _tile_dpbf16ps(0, 3, 2);
        _tile_loadd(7, values + REGISTER, DEPTH_WORDS * WORD);
        _tile_dpbf16ps(1, 7, 2);
        if (s == part.end - 1) {
            _tile_stored(0, low, COLUMNS * WORD);
            _tile_stored(1, high, COLUMNS * WORD);
        }
    }
}

// The largest of `most` and the scores of steps [begin, end). SOME: of which some are not seen.
template <bool SOME>
inline vec most_of(const Part& part, int64_t begin, int64_t end, vec most) {
    vec four[4] = {most, most, most, most};
    for (int64_t j = begin * STEP; j < end * STEP; j += 4)
        for (int64_t i = 0; i < 4; i++) {
            const vec score = load(part.scores + (j + i) * COLUMNS);
            four[i] = SOME ? (vec)_mm512_mask_max_ps((__m512)four[i], part.sees(j + i), (__m512)score, (__m512)four[i])
                           : at_least(four[i], score);
        }
    return at_least(at_least(four[0], four[1]), at_least(four[2], four[3]));
}

// Scores of steps [begin, end), of keys whose weights are summed in chains l and l + 1, become weights.
template <bool SOME>
__attribute__((always_inline)) inline void weights_of(const Part& part, int64_t begin, int64_t end, int64_t l, vec peaks,
                                                      vec* chains) {
    halves pairs;
    for (int i = 0; i < PANEL; i++) pairs[i] = i / 2 + i % 2 * LANES;
    for (int64_t j = begin * STEP + l; j < end * STEP; j += LANES_SUM) {
        const auto weight = [&](int64_t key) __attribute__((always_inline)) {
            const vec found = weight_of<uint32_t>(load(part.scores + key * COLUMNS), peaks);
            return SOME ? (vec)_mm512_maskz_mov_ps(part.sees(key), (__m512)found) : found;
        };
        const vec even = weight(j), odd = weight(j + 1);
        chains[0] += even, chains[1] += odd;
        const halves both = (halves)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        const halves joined = __builtin_shuffle(both, pairs);
        std::memcpy(part.weights + j / 2 * COLUMNS, &joined, sizeof joined);
    }
}

inline void amx_boundary() { asm volatile("" : : : "memory"); }  // the compiler does not know what registers load

// The softmax of a part, beside the scores of `later` and the values of `earlier`; either may be null.
__attribute__((target("amx-tile,amx-bf16"))) void fold_part(const Part& part, const Part* earlier, const Part* later,
                                                            const Cache& cache, int64_t dim) {
    amx_boundary();
    const vec before = load(part.highest);
    vec peaks = most_of<true>(part, part.begin, part.all_begin, before);
    peaks = most_of<false>(part, part.all_begin, part.all_end, peaks);
    peaks = most_of<true>(part, part.all_end, part.end, peaks);
    store(part.highest, peaks);
    vec chains[LANES_SUM];
    for (int64_t slice = 0; slice < SLICES; slice++) {
        if (later) score_slice(*later, cache, dim / 2, slice);
        if (earlier) weigh_slice(*earlier, dim, slice);
        vec two[2] = {};
        weights_of<true>(part, part.begin, part.all_begin, 2 * slice, peaks, two);
        weights_of<false>(part, part.all_begin, part.all_end, 2 * slice, peaks, two);
        weights_of<true>(part, part.all_end, part.end, 2 * slice, peaks, two);
        chains[2 * slice] = two[0], chains[2 * slice + 1] = two[1];
    }
    for (int64_t half = LANES_SUM / 2; half > 0; half /= 2)
        for (int64_t l = 0; l < half; l++) chains[l] += chains[l + half];
    amx_boundary();
    const vec factor = peaks == before ? vec{} + 1.0f : weight_of<uint32_t>(before, peaks);
    store(part.total, load(part.total) * factor + chains[0]);
    if (_mm512_cmpneq_ps_mask((__m512)peaks, (__m512)before))
        for (int64_t e = 0; e < dim; e++) store(part.sums + e * COLUMNS, load(part.sums + e * COLUMNS) * factor);
    amx_boundary();
}

// As `attend` of pairs, the same bits, where keys lie in rows.
__attribute__((target("amx-tile,amx-bf16"))) void attend_tiles(
        const Task& task, const Seen& seen, const float* q, const Cache& cache, const int32_t* table, float* out,
        int64_t head, int64_t kv_heads, int64_t group, int64_t dim, float scale, const Block<uint32_t>& after) {
    const FlushDenormals flushed;
    const int64_t queries = (task.end - task.begin) * group, tiles = (queries + COLUMNS - 1) / COLUMNS, depth = dim / 2;
    const int64_t first = task.first(seen), last = task.last(), padded = tiles * COLUMNS;
    const int64_t of_scores = KEYS * COLUMNS, of_weights = of_scores / 2, of_values = KEYS / 2 * dim;
    static thread_local std::vector<float> floats;
    static thread_local std::vector<uint32_t> elements;
    static thread_local std::vector<int32_t> ends;  // the tokens up to each query
    float* const sums = lined(floats, padded * (dim + 2) + 2 * of_scores + dim);
    float *const highest = sums + padded * dim, *const total = highest + padded;
    float *const scores = total + padded, *const scaled = scores + 2 * of_scores;
    uint32_t* const values = lined(elements, 2 * (of_values + of_weights) + (padded + COLUMNS) * depth);
    uint32_t *const weights = values + 2 * of_values, *const Q = weights + 2 * of_weights, *const rows = Q + padded * depth;
    const auto place = [&](int64_t i) { return (((task.begin + i / group) * kv_heads + head) * group + i % group) * dim; };
    ends.assign(padded, last);
    std::fill(sums, sums + padded * dim, 0.0f);
    for (int64_t i = 0; i < padded; i++) {
        if (i < queries) {
            ends[i] = task.position + i / group + 1;
            for (int64_t e = 0; e < dim; e++) scaled[e] = q[place(i) + e] * scale;
            to_blocks(scaled, dim, rows + i % COLUMNS * depth);
        }
        highest[i] = seen.sink<uint32_t>(head * group + i % group);
        total[i] = seen.sinks ? 1.0f : 0.0f;
        const int64_t start = i / COLUMNS * COLUMNS;
        if (i % COLUMNS == COLUMNS - 1) to_columns(rows, std::min(COLUMNS, queries - start), depth, Q + start * depth);
    }
    AmxShapes shapes;
    std::fill(shapes.rows, shapes.rows + 8, AMX_ROWS);
    shapes.set();
    Block<uint32_t> blocks[3];  // of the part before too
    Part parts[3];
    int64_t count = 0;
    const auto fold = [&](int64_t n, bool has_later) {
        fold_part(parts[n % 3], n ? &parts[(n + 2) % 3] : nullptr, has_later ? &parts[(n + 1) % 3] : nullptr, cache, dim);
    };
    int64_t b = first / KEYS;
    blocks[b % 3].find(cache, table, head, b * KEYS, first, last, &after);
    for (int64_t start = b * KEYS; start < last; start += KEYS, b++) {
        const Block<uint32_t>& block = blocks[b % 3];
        Block<uint32_t>& later = blocks[(b + 1) % 3];
        const bool has_later = start + KEYS < last;
        if (has_later) later.find(cache, table, head, start + KEYS, first, last, &after);
        const Block<uint32_t>& next = has_later ? later : after;
        const int64_t before = count;
        for (int64_t t = 0; t < tiles; t++) {
            for (int64_t j = t * KEYS / tiles; j < (t + 1) * KEYS / tiles; j++)
                for (int64_t at = 0; at < 2 * dim; at += LINE) __builtin_prefetch(next.rows[j] + at, 0, 2);
            const int64_t query = t * COLUMNS;
            const int64_t from = std::max(block.from, ends[query] - start - seen.window);
            if (from >= std::min(block.to, ends[query + COLUMNS - 1] - start)) continue;
            Part& part = parts[count % 3];
            part.block = &block, part.queries = Q + query * depth, part.values = values + b % 2 * of_values;
            part.sums = sums + query * dim, part.highest = highest + query, part.total = total + query;
            part.scores = scores + count % 2 * of_scores, part.weights = weights + count % 2 * of_weights;
            ints own;
            std::memcpy(&own, ends.data() + query, sizeof own);
            part.see(own - (int32_t)start, seen.window);
            if (count) fold(count - 1, true);
            for (int64_t slice = 0; !count && slice < SLICES; slice++) score_slice(part, cache, depth, slice);
            if (count++ == before) turn_values(cache, block, next, dim, values + b % 2 * of_values);
        }
    }
    if (count) {
        fold(count - 1, false);
        for (int64_t slice = 0; slice < SLICES; slice++) weigh_slice(parts[(count - 1) % 3], dim, slice);
    }
    _tile_release();
    for (int64_t i = 0; i < padded; i += COLUMNS) {
        const vec found = load(total + i), whole = found > vec{} ? found : vec{} + 1.0f;  // of padding: 0
        for (int64_t e = 0; e < dim; e += LANES) {
            words square[LANES];
            for (int64_t l = 0; l < LANES; l++) square[l] = (words)(load(sums + i * dim + (e + l) * COLUMNS) / whole + 0.0f);
            transpose(square);
            for (int64_t l = 0; l < std::min(COLUMNS, queries - i); l++)
                std::memcpy(out + place(i + l) + e, &square[l], sizeof square[l]);
        }
    }
}
#endif

template <typename E>
void attend(const Task& task, const Seen& seen, const float* q, const Cache& cache, const int32_t* table, float* out,
            int64_t head, int64_t kv_heads, int64_t group, int64_t dim, float scale, const Block<E>& after) {
    constexpr int64_t BLOCK = ::BLOCK<E>, BLOCK_WORDS = words_of<E>(BLOCK);
    const std::conditional_t<PAIRED<E>, FlushDenormals, Nothing> flushed;
    const int64_t queries = (task.end - task.begin) * group, panels = (dim + PANEL - 1) / PANEL, wide = panels * PANEL;
    const int64_t first = task.first(seen), last = task.last(), depth = words_of<E>(dim);
    static thread_local std::vector<float> floats;
    static thread_local std::vector<E> elements;
    float* const sums = lined(floats, queries * (wide + 2 * depth) + QUERY_ROWS<E> * BLOCK + dim + 2 * (queries + LANES));
    float *const S = sums + queries * wide, *const scaled = S + QUERY_ROWS<E> * BLOCK;
    float *const highest = scaled + dim, *const total = highest + queries + LANES, *const factors = total + queries + LANES;
    E* const values = lined(elements, BLOCK_WORDS * (wide + QUERY_ROWS<E>) + (BLOCK + 2 * LANES + queries) * depth);
    E *const P = values + BLOCK_WORDS * wide, *const keys = P + BLOCK_WORDS * QUERY_ROWS<E>;
    E *const room = keys + BLOCK * depth, *const columns = room + LANES * depth, *const Q = columns + LANES * depth;
    // Whether values, and keys, are multiplied where they lie, without packing.
    const bool weighs = PAIRED<E> && queries <= MOST_WEIGHED && cache.half_width && dim % PANEL == 0;
    const bool scores = weighs && dim == 2 * depth;
    std::fill(sums, sums + queries * wide, 0.0f);
    for (int64_t i = 0; i < queries; i++) {  // query i is head i % group of token i / group
        const float* in = q + (((task.begin + i / group) * kv_heads + head) * group + i % group) * dim;
        for (int64_t e = 0; e < dim; e++) scaled[e] = in[e] * scale;
        if constexpr (PAIRED<E>) {
            to_words(scaled, dim, Q + i * depth);
            if (scores) to_halves(Q + i * depth, depth, factors + i * 2 * depth, factors + (i * 2 + 1) * depth);
            else chain_words(Q + i * depth, depth);
        } else {
            std::memcpy(Q + i * depth, scaled, dim * sizeof(float));
        }
        highest[i] = seen.sink<E>(head * group + i % group);
        total[i] = seen.sinks ? 1.0f : 0.0f;
    }
    bool in_pages = false;
#if defined(AMX)
    if constexpr (PAIRED<E>) in_pages = queries <= FEW_QUERIES && lie_in_rows(cache, dim);
    if constexpr (PAIRED<E>)
        if (in_pages) to_columns(Q, queries, depth, columns);
#endif
    Block<E> blocks[2], *now = blocks, *later = blocks + 1;
    now->find(cache, table, head, first / BLOCK * BLOCK, first, last, &after);
    // What no query sees of the first block stays zero: its pages may belong to other rows.
    if (now->from > 0) std::fill(values, values + BLOCK_WORDS * wide, E{});
    for (int64_t start = first / BLOCK * BLOCK; start < last; start += BLOCK, std::swap(now, later)) {
        if (start + BLOCK < last) later->find(cache, table, head, start + BLOCK, first, last, &after);
        const Block<E>&block = *now, &next = start + BLOCK < last ? *later : after;
        const int64_t count = block.to;
        const bool few = scores && (!in_pages || count - block.from <= FEW_KEYS);
        if constexpr (PAIRED<E>)
            if (few)
                with_constant<MOST_WEIGHED>(queries, [&](auto number) {
                    score_keys<number>(block, next, depth, factors, block.from, count, S);
                });
        if (!in_pages && !few) gather_keys(cache, block, next, dim, keys, room);
#if defined(AMX)
        if constexpr (PAIRED<E>)
            if (in_pages && !few) score_in_pages(cache, block, next, queries, columns, depth, S);
#endif
        if (!weighs) gather_values(cache, block, next, dim, values);
        for (int64_t i = 0, rows; i < queries; i += rows) {
            rows = std::min(QUERY_ROWS<E>, queries - i);
            // Keys that some of these queries see; the others of the block would add 0.
            const auto end_of = [&](int64_t query) { return task.position + query / group + 1 - start; };
            const int64_t seen_end = std::min(count, end_of(i + rows - 1));
            const int64_t begin = std::max<int64_t>(0, end_of(i) - seen.window) / STEP * STEP;
            if (begin >= seen_end) continue;
            const int64_t end = std::min(BLOCK, (seen_end + STEP - 1) / STEP * STEP);
            if (!in_pages && !few)
                multiply<false>(rows, (end - begin) / PANEL, Q + i * depth, depth, keys + begin * depth, depth * PANEL,
                                depth, S + begin, BLOCK, ZEROS);
            for (int64_t r = 0; r < rows; r += LANES) {
                const int64_t few = std::min<int64_t>(LANES, rows - r);
                Range ranges[LANES];
                int64_t seen_to = end_of(i + r), of_group = (i + r) % group;
                for (int64_t l = 0; l < few; l++) {
                    ranges[l] = {std::max<int64_t>(0, seen_to - seen.window), std::min(count, seen_to)};
                    if (++of_group == group) of_group = 0, seen_to++;
                }
                alignas(LINE) float shrink[LANES];
                const auto fold = few <= 4 ? fold_scores<4, E> : fold_scores<LANES, E>;
                fold(S + r * BLOCK, ranges, few, begin, end, !weighs, P + r * BLOCK_WORDS, highest + i + r, total + i + r,
                     shrink);
                for (int64_t l = 0; l < few; l++) {
                    if (shrink[l] == 1.0f) continue;
                    float* const sum = sums + (i + r + l) * wide;
                    for (int64_t e = 0; e < wide; e++) sum[e] *= shrink[l];
                }
            }
            if constexpr (PAIRED<E>) {
                if (weighs) {
                    with_constant<MOST_WEIGHED>(queries, [&](auto number) {
                        weigh_values<number>(block, next, cache.kv, dim, P, begin, std::min(count, end), sums);
                    });
                    continue;
                }
            }
            multiply<false>(rows, panels, P + words_of<E>(begin), BLOCK_WORDS, values + words_of<E>(begin) * PANEL,
                            BLOCK_WORDS * PANEL, words_of<E>(seen_end) - words_of<E>(begin), sums + i * wide, wide);
        }
    }
    for (int64_t i = 0; i < queries; i++) {
        float* to = out + (((task.begin + i / group) * kv_heads + head) * group + i % group) * dim;
        const float whole = total[i] > 0.0f ? total[i] : 1.0f;  // of padding: 0
        // Sums that vanish are -0 or 0 by what others of the tile see; + 0 makes them one.
        for (int64_t e = 0; e < dim; e++) to[e] = sums[i * wide + e] / whole + 0.0f;
    }
}
}  // namespace

// q and out [tokens][q_heads][dim], packed; sinks [q_heads] or null. Keys and values of this step's tokens are in their
// pages already.
extern "C" void attention(const float* q, const char* cache, int64_t page_stride, int64_t head_stride,
                          int64_t kv_stride, int64_t token_stride, int64_t half_width, const int32_t* table,
                          int64_t table_row, const int32_t* cu, const int32_t* lens, float* out, int64_t rows,
                          int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t page_tokens, float scale,
                          int64_t window, const float* sinks, int64_t paired) {
    const int64_t group = q_heads / kv_heads;
    const int64_t shares = cu[rows] * q_heads / TASK_QUERIES / (2 * omp_get_max_threads());  // two tasks for each thread
    const int64_t queries = TASK_QUERIES * std::clamp<int64_t>(shares, 1, QUERIES_FACTOR);
    const int64_t tile = std::max<int64_t>(1, std::min(queries, TASK_FLOATS / dim) / group);
    const Cache pages{cache, page_stride, head_stride, kv_stride, token_stride, half_width, page_tokens};
    std::vector<Task> tasks;
    int64_t keys = 0;
    for (int64_t b = 0; b < rows; b++) {
        for (int64_t t = cu[b]; t < cu[b + 1]; t += tile) {
            tasks.push_back({b, t, std::min<int64_t>(t + tile, cu[b + 1]), lens[b] - (cu[b + 1] - t)});
            keys += std::min(tasks.back().position + 1, window);
        }
    }
    const int64_t count = tasks.size();
    const auto attend_all = [&](auto element) {
        using E = decltype(element);
        const Seen seen{window, sinks};
        const auto table_of = [&](const Task& task) { return table + task.row * table_row; };
#pragma omp parallel for schedule(dynamic) if (keys * kv_heads * dim >= 1 << 14)
        for (int64_t at = 0; at < count * kv_heads; at++) {  // the longest first: late tokens see the most keys
            const auto task_of = [&](int64_t at) -> const Task& { return tasks[count - 1 - at / kv_heads]; };
            const Task& task = task_of(at);
            // What this thread probably takes next; its first block is fetched meanwhile.
            const int64_t later = std::min(at + omp_get_num_threads(), count * kv_heads - 1);
            const Task& other = task_of(later);
            const int64_t first = other.first(seen);
            Block<E> after;
            after.find(pages, table_of(other), later % kv_heads, first / BLOCK<E> * BLOCK<E>, first, other.last(),
                       nullptr);
            auto run = attend<E>;
#if defined(AMX)
            if constexpr (PAIRED<E>)
                if ((task.end - task.begin) * group > FEW_QUERIES && dim <= TILE_DIM_MAX && lie_in_rows(pages, dim))
                    run = attend_tiles;
#endif
            run(task, seen, q, pages, table_of(task), out, at % kv_heads, kv_heads, group, dim, scale * LOG_E<E>, after);
        }
    };
    paired ? attend_all(uint32_t{}) : attend_all(float{});
}
