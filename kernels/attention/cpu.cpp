// Paged causal attention: one kernel for decode, replay and prefill.
//
// Keys are taken in blocks aligned at position 0 of the sequence and folded in by online softmax, block after block.
// A query sees the same blocks in the same order whichever step, row or tile it is computed in, hence the same bits:
// a block of which it sees nothing, which is there for others of its tile, changes nothing of it.
#include <omp.h>

#include "../shared/ranges.h"
#include "amx.h"
#include "blocks.h"
#include "few.h"

namespace {
constexpr int64_t TASK_QUERIES = 32 * 12;  // (token, head) pairs of one task: whole tiles of any machine
constexpr int64_t QUERIES_FACTOR = 4;      // as many times more for a long prompt: a task reads all its keys
constexpr int64_t TASK_FLOATS = 96 << 10;  // of their sums, which stay in L2

// What one task needs besides pages, in memory that its thread keeps.
template <typename E>
struct Room {
    float *sums, *scores, *scaled, *highest, *total, *factors;  // sums [queries][wide], scores [QUERY_ROWS][BLOCK]
    E *values, *weights, *keys, *row, *columns, *queries;       // panels of a block; queries [queries][depth]

    Room(int64_t count, int64_t wide, int64_t depth, int64_t dim) {
        static thread_local std::vector<float> floats;
        static thread_local std::vector<E> elements;
        constexpr int64_t ROWS = QUERY_ROWS<E>, SIZE = BLOCK<E>, WORDS = words_of<E>(SIZE);
        sums = lined(floats, count * (wide + 2 * depth) + ROWS * SIZE + dim + 2 * (count + LANES));
        scores = sums + count * wide;
        scaled = scores + ROWS * SIZE;
        highest = scaled + dim;
        total = highest + count + LANES;
        factors = total + count + LANES;
        values = lined(elements, WORDS * (wide + ROWS) + (SIZE + 2 * LANES + count) * depth);
        weights = values + WORDS * wide;
        keys = weights + WORDS * ROWS;
        row = keys + SIZE * depth;
        columns = row + LANES * depth;
        queries = columns + LANES * depth;
    }
};

// One task: block after block, scores of all its queries, their weights, and the sums of values.
template <typename E>
void attend(const Call& call, const Task& task, const int32_t* table, int64_t head, const Block<E>& after) {
    constexpr int64_t BLOCK = ::BLOCK<E>, BLOCK_WORDS = words_of<E>(BLOCK);
    const std::conditional_t<PAIRED<E>, FlushDenormals, Nothing> flushed;
    const bool coded = call.scales.data;
    Decoded<E> decoded(call.cache, call.dim, coded);
    const Cache& cache = decoded.cache;
    const Seen& seen = call.seen;
    const int64_t group = call.group, dim = call.dim;
    const int64_t queries = (task.end - task.begin) * group, panels = (dim + PANEL - 1) / PANEL, wide = panels * PANEL;
    const int64_t first = task.first(seen), last = task.last(), depth = words_of<E>(dim);
    const Room<E> room(queries, wide, depth, dim);
    float *const sums = room.sums, *const S = room.scores, *const scaled = room.scaled;
    float *const highest = room.highest, *const total = room.total, *const factors = room.factors;
    E *const values = room.values, *const P = room.weights, *const keys = room.keys, *const Q = room.queries;
    // Whether values, and keys, are multiplied where they lie, without packing.
    const bool weighs = PAIRED<E> && queries <= MOST_WEIGHED && cache.half_width && dim % PANEL == 0;
    const bool scores = weighs && dim == 2 * depth;
    std::fill(sums, sums + queries * wide, 0.0f);
    for (int64_t i = 0; i < queries; i++) {  // query i is head i % group of token i / group
        const float* in = call.q + call.place(task, head, i);
        for (int64_t e = 0; e < dim; e++) scaled[e] = in[e] * call.scale;
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
        if (in_pages) to_columns(Q, queries, depth, room.columns);
#endif
    // Few queries decode codes where they lie; for others a block is decoded once.
    const bool in_place = coded && scores && !in_pages;
    BlockScales of_codes{};
    Block<E> blocks[2], *now = blocks, *later = blocks + 1;
    now->find(call.cache, table, head, first / BLOCK * BLOCK, first, last, &after);
    // What no query sees of the first block stays zero: its pages may belong to other rows.
    if (now->from > 0) std::fill(values, values + BLOCK_WORDS * wide, E{});
    for (int64_t start = first / BLOCK * BLOCK; start < last; start += BLOCK, std::swap(now, later)) {
        if (start + BLOCK < last) later->find(call.cache, table, head, start + BLOCK, first, last, &after);
        const Block<E>& soon = start + BLOCK < last ? *later : after;
        if (coded && !in_place) decoded.decode(call.cache, call.scales, table, head, start, *now, soon, dim);
        if constexpr (PAIRED<E>)
            if (in_place) of_codes.find(call.cache, call.scales, table, head, start, *now);
        const bool is_decoded = coded && !in_place;
        const Block<E>&block = is_decoded ? decoded.block : *now, &next = is_decoded ? decoded.block : soon;
        const int64_t count = block.to;
        const bool few = scores && (!in_pages || count - block.from <= FEW_KEYS);
        if constexpr (PAIRED<E>)
            if (few)
                with_constant<MOST_WEIGHED>(queries, [&](auto number) {
                    const auto score = in_place ? score_keys<number, true> : score_keys<number, false>;
                    score(block, next, depth, factors, block.from, count, of_codes.keys, S);
                });
        if (!in_pages && !few) gather_keys(cache, block, next, dim, keys, room.row);
#if defined(AMX)
        if constexpr (PAIRED<E>)
            if (in_pages && !few) score_in_pages(cache, block, next, queries, room.columns, depth, S);
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
                        const auto weigh = in_place ? weigh_values<number, true> : weigh_values<number, false>;
                        const int64_t kv = in_place ? call.cache.kv : cache.kv;
                        weigh(block, next, kv, dim, P, begin, std::min(count, end), of_codes.values, sums);
                    });
                    continue;
                }
            }
            multiply<false>(rows, panels, P + words_of<E>(begin), BLOCK_WORDS, values + words_of<E>(begin) * PANEL,
                            BLOCK_WORDS * PANEL, words_of<E>(seen_end) - words_of<E>(begin), sums + i * wide, wide);
        }
    }
    for (int64_t i = 0; i < queries; i++) {
        float* to = call.out + call.place(task, head, i);
        const float whole = total[i] > 0.0f ? total[i] : 1.0f;  // of padding: 0
        // Sums that vanish are -0 or 0 by what others of the tile see; + 0 makes them one.
        for (int64_t e = 0; e < dim; e++) to[e] = sums[i * wide + e] / whole + 0.0f;
    }
}
}  // namespace

// q and out [tokens][q_heads][dim], packed; sinks [q_heads] or null. Keys and values of this step's tokens are in their
// pages already.
extern "C" void attention(const float* q, const char* cache, int64_t num_pages, int64_t page_stride, int64_t head_stride,
                          int64_t kv_stride, int64_t token_stride, int64_t kind, uint8_t* scales,
                          int64_t scales_page, int64_t scales_head, int64_t scales_kv, int64_t scales_token,
                          int64_t page_tokens, const int32_t* table, int64_t table_row, int64_t table_width, const int32_t* cu,
                          const int32_t* lens, int64_t rows, int64_t tokens, float* out, int64_t q_heads, int64_t kv_heads,
                          int64_t dim, float scale, int64_t window, const float* sinks, int64_t paired) {
    assert_pages("attention", table, table_row, table_width, cu, lens, rows, tokens, page_tokens, num_pages, window);
    const int64_t group = q_heads / kv_heads;
    const int64_t shares = tokens * q_heads / TASK_QUERIES / (2 * omp_get_max_threads());  // two tasks for each thread
    const int64_t queries = TASK_QUERIES * std::clamp<int64_t>(shares, 1, QUERIES_FACTOR);
    const int64_t tile = std::max<int64_t>(1, std::min(queries, TASK_FLOATS / dim) / group);
    const Cache pages{cache, page_stride, head_stride, kv_stride, token_stride, kind == 1, page_tokens};
    const Scales lie{scales, scales_page, scales_head, scales_kv, scales_token};
    const Seen seen{window, sinks};
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
        const Call call{q, pages, lie, seen, out, kv_heads, group, dim, scale * LOG_E<E>};
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
            run(call, task, table_of(task), at % kv_heads, after);
        }
    };
    paired ? attend_all(uint32_t{}) : attend_all(float{});
}
