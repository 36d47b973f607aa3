// Copies of tokens between pages and another engine's cache, in the longest runs that both sides have.
#include "../shared/cpu.h"
#include "../shared/ranges.h"

namespace {
struct Side {
    char* base;
    int64_t block, head, token;  // strides in bytes; a block of the page side is a page

    Side(const int64_t* numbers)
        : base(reinterpret_cast<char*>(numbers[0])), block(numbers[1]), head(numbers[2]), token(numbers[3]) {}
};
}  // namespace

// planes [num_planes][9]: see planes.py. Tokens [0, tokens) of `pages` and of `slots`; heads are inside of a run of
// tokens, so that what an engine keeps as [token][head] is written, or read, in one go.
extern "C" void page_copy(const int64_t* planes, int64_t num_planes, int64_t heads, int64_t page_tokens,
                          int64_t block_tokens, const int32_t* pages, int64_t pages_end, const int64_t* slots,
                          int64_t slots_end, int64_t tokens, int64_t is_export) {
    const int64_t num_pages = (tokens + page_tokens - 1) / page_tokens;
    assert_within("page_copy", "page", pages, num_pages, 0, pages_end);
    assert_within("page_copy", "slot", slots, tokens, 0, slots_end);
#pragma omp parallel for collapse(2) if (num_planes * heads * tokens >= 1 << 9)
    for (int64_t n = 0; n < num_pages; n++) {
        for (int64_t p = 0; p < num_planes; p++) {
            const Side page(planes + 9 * p), cache(planes + 9 * p + 4);
            const int64_t row_bytes = planes[9 * p + 8];
            const bool joined = page.token == row_bytes && cache.token == row_bytes;
            const int64_t end = std::min(tokens, (n + 1) * page_tokens);
            for (int64_t t = n * page_tokens, run; t < end; t += run) {
                const int64_t slot = slots[t], left = block_tokens - slot % block_tokens;
                for (run = 1; joined && run < left && t + run < end && slots[t + run] == slot + run;) run++;
                char* to = page.base + pages[n] * page.block + t % page_tokens * page.token;
                char* from = cache.base + slot / block_tokens * cache.block + slot % block_tokens * cache.token;
                for (int64_t h = 0; h < heads; h++) {
                    char *ours = to + h * page.head, *theirs = from + h * cache.head;
                    std::memcpy(is_export ? theirs : ours, is_export ? ours : theirs, run * row_bytes);
                }
            }
        }
    }
}
