// Attention by AMX: keys are the rows of a product, where they lie in pages, and queries its columns.
#pragma once
#include "blocks.h"

#if defined(AMX)
namespace {
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
__attribute__((target("amx-tile,amx-bf16"))) void attend_tiles(const Call& call, const Task& task, const int32_t* table,
                                                               int64_t head, const Block<uint32_t>& after) {
    const FlushDenormals flushed;
    const Cache& cache = call.cache;
    const Seen& seen = call.seen;
    const int64_t group = call.group, dim = call.dim;
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
    const auto place = [&](int64_t i) { return call.place(task, head, i); };
    ends.assign(padded, last);
    std::fill(sums, sums + padded * dim, 0.0f);
    for (int64_t i = 0; i < padded; i++) {
        if (i < queries) {
            ends[i] = task.position + i / group + 1;
            for (int64_t e = 0; e < dim; e++) scaled[e] = call.q[place(i) + e] * call.scale;
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
                std::memcpy(call.out + place(i + l) + e, &square[l], sizeof square[l]);
        }
    }
}
}  // namespace
#endif
