// Ranges of indices. Entry points assert them before they compute: an index beyond its table would read or write what
// belongs to others.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Ends the process with a line that names `what`, unless each of `count` numbers is in [lowest, end).
template <typename T>
static inline void assert_within(const char* kernel, const char* what, const T* numbers, int64_t count, int64_t lowest,
                                 int64_t end) {
    const auto is_beyond = [=](T number) { return !(number >= lowest && number < end); };
    bool any = false;
    for (int64_t i = 0; i < count; i++) any |= is_beyond(numbers[i]);
    if (!any) return;
    const double number = *std::find_if(numbers, numbers + count, is_beyond);
    std::fprintf(stderr, "%s: %s %.15g is not in [%lld, %lld)\n", kernel, what, number, (long long)lowest, (long long)end);
    std::abort();
}

// Of the rows of a step (rows.py): their starts.
static inline void assert_rows(const char* kernel, const int32_t* cu, int64_t rows, int64_t tokens) {
    assert_within(kernel, "start", cu, 1, 0, 1);
    for (int64_t b = 0; b < rows; b++) assert_within(kernel, "start", cu + b + 1, 1, cu[b], tokens + 1);
    assert_within(kernel, "start", cu + rows, 1, tokens, tokens + 1);
}

// ... their lengths, and the pages of which a token of its row sees one of `window` keys, in tables of `width` pages.
static inline void assert_pages(const char* kernel, const int32_t* table, int64_t table_row, int64_t width,
                                const int32_t* cu, const int32_t* lens, int64_t rows, int64_t tokens,
                                int64_t page_tokens, int64_t pages, int64_t window) {
    assert_rows(kernel, cu, rows, tokens);
    for (int64_t b = 0; b < rows; b++) {
        const int64_t count = cu[b + 1] - cu[b], first = std::max<int64_t>(0, lens[b] - count - window + 1) / page_tokens;
        if (!count) continue;
        assert_within(kernel, "length", lens + b, 1, 0, width * page_tokens + 1);
        const int64_t end = (lens[b] + page_tokens - 1) / page_tokens;
        assert_within(kernel, "page", table + b * table_row + first, end - first, 0, pages);
    }
}

// ... and their states.
static inline void assert_states(const char* kernel, const int32_t* cu, const int32_t* read, const int32_t* writes,
                                 int64_t rows, int64_t kept, int64_t tokens, int64_t states) {
    assert_rows(kernel, cu, rows, tokens);
    assert_within(kernel, "state to read", read, rows, -1, states);
    assert_within(kernel, "state to write", writes, rows * kept, -1, states);
}
