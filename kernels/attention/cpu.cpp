// Paged causal attention: one kernel for decode, replay and prefill.
//
// Keys are taken in blocks aligned at position 0 of the sequence and folded in by online softmax, block after block.
// A query sees the same blocks in the same order whichever step, row or tile it is computed in, hence the same bits:
// a block of which it sees nothing, which is there for others of its tile, changes nothing of it.
#include "../shared/cpu.h"

namespace {
constexpr int64_t BLOCK = 64;         // keys
constexpr int64_t TILE_QUERIES = 8 * 12;  // (token, head) pairs of one task: whole tiles of any machine
constexpr float LOWEST = -1e30f;      // below any score, and finite: it may be taken from itself
static_assert(BLOCK % PANEL == 0);

struct Cache {  // [pages][kv_heads][K|V][page_tokens][dim], strides in bytes
    const char* data;
    int64_t page, head, kv, token, half_width, page_tokens;
};

struct Seen {  // by each query: `window` keys, and the sink of its head, or null
    int64_t window;
    const float* sinks;
};

struct Task {
    int64_t row, begin, end;  // tokens [begin, end) of the batch
    int64_t position;         // of token `begin` in its sequence
};

float element(const char* at, int64_t i, bool half_width) {
    if (!half_width) {
        float x;
        std::memcpy(&x, at + 4 * i, sizeof x);
        return x;
    }
    uint16_t bits;
    std::memcpy(&bits, at + 2 * i, sizeof bits);
    return __builtin_bit_cast(float, (uint32_t)bits << 16);
}

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

// LANES keys as so many columns of a panel [dim][PANEL].
template <bool half_width>
void gather_keys(const char* const* keys, int64_t dim, float* columns) {
    constexpr int64_t WIDTH = half_width ? 2 : 4, STEP = LANES * 4 / WIDTH;
    int64_t e = 0;
    for (; e + STEP <= dim; e += STEP) {
        words square[LANES];
        for (int j = 0; j < LANES; j++) std::memcpy(&square[j], keys[j] + e * WIDTH, sizeof square[j]);
        transpose(square);
        for (int i = 0; i < LANES; i++) {
            if constexpr (half_width) {  // a word has two elements
                store(columns + (e + 2 * i) * PANEL, (vec)(square[i] << 16));
                store(columns + (e + 2 * i + 1) * PANEL, (vec)(square[i] & 0xffff0000u));
            } else {
                store(columns + (e + i) * PANEL, (vec)square[i]);
            }
        }
    }
    for (; e < dim; e++)
        for (int j = 0; j < LANES; j++) columns[e * PANEL + j] = element(keys[j], e, half_width);
}

// Keys start + [from, to) as columns [from, to) of panels [BLOCK / PANEL][dim][PANEL], values as rows of panels
// [dim / PANEL][BLOCK][PANEL]. Columns beside them repeat a key: nobody looks at their scores.
template <bool half_width>
void gather(const Cache& cache, const int32_t* table, int64_t head, int64_t start, int64_t from, int64_t to,
            int64_t dim, float* keys, float* values) {
    const char* rows[BLOCK];
    int64_t page = (start + from) / cache.page_tokens, slot = (start + from) % cache.page_tokens;
    for (int64_t j = from; j < to; j++, slot++) {
        if (slot == cache.page_tokens) page++, slot = 0;
        rows[j] = cache.data + table[page] * cache.page + head * cache.head + slot * cache.token;
    }
    std::fill(rows, rows + from, rows[from]);
    std::fill(rows + to, rows + BLOCK, rows[from]);
    for (int64_t j = from / LANES * LANES; j < to; j += LANES)
        gather_keys<half_width>(rows + j, dim, keys + j / PANEL * dim * PANEL + j % PANEL);
    for (int64_t j = from; j < to; j++)
        for (int64_t p = 0; p < dim; p += PANEL) {
            const int64_t width = std::min<int64_t>(PANEL, dim - p);
            for (int64_t e = 0; e < width; e++)
                values[p * BLOCK + j * PANEL + e] = element(rows[j] + cache.kv, p + e, half_width);
        }
}

// Turns BLOCK scores of one query into weights, of which [from, to) count. Returns the factor by which what was
// summed before shrinks: exactly 1 where none counts.
float fold_scores(float* score, int64_t from, int64_t to, float& highest, float& total) {
    const auto larger = [](vec a, vec b) { return a < b ? b : a; };
    vec most = splat(highest);
    for (int64_t j = 0; j < from; j++) score[j] = -INFINITY;
    for (int64_t j = to; j < BLOCK; j++) score[j] = -INFINITY;
    for (int64_t j = 0; j < BLOCK; j += LANES) most = larger(most, load(score + j));
    const float peak = tree(most, larger);
    for (int64_t j = 0; j < BLOCK; j++) score[j] = exp_f32(score[j] - peak);
    for (int64_t j = 0; j < from; j++) score[j] = 0.0f;
    for (int64_t j = to; j < BLOCK; j++) score[j] = 0.0f;
    const float shrink = exp_f32(highest - peak);
    highest = peak;
    total = total * shrink + sum(score, BLOCK);
    return shrink;
}

void attend(const Task& task, const Seen& seen, const float* q, const Cache& cache, const int32_t* table, float* out,
            int64_t head, int64_t kv_heads, int64_t group, int64_t dim, float scale) {
    const int64_t queries = (task.end - task.begin) * group, panels = (dim + PANEL - 1) / PANEL, wide = panels * PANEL;
    const int64_t first = std::max<int64_t>(0, task.position - seen.window + 1);
    const int64_t last = task.position + task.end - task.begin;
    static thread_local std::vector<float> scratch;
    const int64_t cleared = (BLOCK + queries) * wide;
    float* const values = lined(scratch, cleared + BLOCK * dim + queries * (BLOCK + dim + 2));
    float *const sums = values + BLOCK * wide, *const keys = sums + queries * wide, *const S = keys + BLOCK * dim;
    float *const Q = S + queries * BLOCK, *const highest = Q + queries * dim, *const total = highest + queries;
    std::fill(values, values + cleared, 0.0f);
    for (int64_t i = 0; i < queries; i++) {  // query i is head i % group of token i / group
        const float* in = q + (((task.begin + i / group) * kv_heads + head) * group + i % group) * dim;
        for (int64_t e = 0; e < dim; e++) Q[i * dim + e] = in[e] * scale;
        highest[i] = seen.sinks ? std::max(LOWEST, seen.sinks[head * group + i % group]) : LOWEST;
        total[i] = seen.sinks ? 1.0f : 0.0f;
    }
    for (int64_t start = first / BLOCK * BLOCK; start < last; start += BLOCK) {
        // What nobody sees of the first block stays zero: its pages may be somebody else's.
        const int64_t unseen = std::max<int64_t>(0, first - start), count = std::min(BLOCK, last - start);
        (cache.half_width ? gather<true> : gather<false>)(cache, table, head, start, unseen, count, dim, keys, values);
        std::fill(S, S + queries * BLOCK, 0.0f);
        multiply<false>(queries, BLOCK / PANEL, Q, dim, keys, dim * PANEL, dim, S, BLOCK);
        for (int64_t i = 0; i < queries; i++) {
            const int64_t end = task.position + i / group + 1 - start;
            const int64_t from = std::clamp<int64_t>(end - seen.window, 0, BLOCK);
            const int64_t to = std::clamp<int64_t>(end, 0, count);
            const float shrink = fold_scores(S + i * BLOCK, from, to, highest[i], total[i]);
            if (shrink == 1.0f) continue;
            for (int64_t e = 0; e < wide; e++) sums[i * wide + e] *= shrink;
        }
        multiply<false>(queries, panels, S, BLOCK, values, BLOCK * PANEL, count, sums, wide);
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
                          int64_t window, const float* sinks) {
    const int64_t group = q_heads / kv_heads, tile = std::max<int64_t>(1, TILE_QUERIES / group);
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
#pragma omp parallel for collapse(2) schedule(dynamic) if (keys * kv_heads * dim >= 1 << 14)
    for (int64_t i = count - 1; i >= 0; i--)  // the longest first: late tokens see the most keys
        for (int64_t h = 0; h < kv_heads; h++)
            attend(tasks[i], {window, sinks}, q, pages, table + tasks[i].row * table_row, out, h, kv_heads, group, dim,
                   scale);
}
