// Placement compiled: the prefix table (prefix_table.py), and score and pick over the flat table of the fleet
// (placement.py, cost_model.py). The Python files are the definition. Every float has their order of operations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

namespace {

using Slots = std::vector<int32_t>;

constexpr int32_t NO_HOLDER = -1;  // of a key; holder set n is written as -2 - n
constexpr uint64_t FREE = 0;
constexpr size_t POSITIONS_MIN = 1 << 10;
constexpr double FILL_MAX = 0.7;
constexpr int64_t LOG_SLACK = 1024;

struct HashOfSlots {
    size_t operator()(const Slots& slots) const {
        uint64_t hash = slots.size();
        for (const int32_t slot : slots) hash = (hash ^ (uint64_t)slot) * 0x9E3779B97F4A7C15ull;
        return hash ^ (hash >> 32);
    }
};

// Sets of at least two slots, each stored once, with the number of keys that they hold.
class HolderSets {
  public:
    // The holders that a value stands for, ascending.
    const int32_t* begin(const int32_t& value) const { return value < NO_HOLDER ? at(value).data() : &value; }
    const int32_t* end(const int32_t& value) const {
        return value < NO_HOLDER ? at(value).data() + at(value).size() : &value + (value != NO_HOLDER);
    }

    bool has(int32_t value, int32_t slot) const {
        return value < NO_HOLDER ? std::binary_search(at(value).begin(), at(value).end(), slot) : value == slot;
    }

    // The value of the holders of `value` with `slot`, or without it. It counts no key.
    int32_t changed(int32_t value, int32_t slot, bool joins) {
        Slots after(begin(value), end(value));
        const auto place = std::lower_bound(after.begin(), after.end(), slot);
        if (joins) after.insert(place, slot);
        else after.erase(place);
        if (after.empty()) return NO_HOLDER;
        if (after.size() == 1) return after[0];
        const auto found = values_.find(after);
        if (found != values_.end()) return found->second;
        if (vacant_.empty()) {
            vacant_.push_back(NO_HOLDER - 1 - (int32_t)sets_.size());
            sets_.emplace_back();
        }
        const int32_t made = vacant_.back();
        vacant_.pop_back();
        sets_[NO_HOLDER - 1 - made] = {after, 0};
        values_.emplace(std::move(after), made);
        return made;
    }

    void count(int32_t value, int64_t change) {
        if (value >= NO_HOLDER) return;
        Set& set = sets_[NO_HOLDER - 1 - value];
        set.num_keys += change;
        if (set.num_keys) return;
        values_.erase(set.slots);
        set.slots = Slots();
        vacant_.push_back(value);
    }

  private:
    struct Set {
        Slots slots;
        int64_t num_keys;
    };
    const Slots& at(int32_t value) const { return sets_[NO_HOLDER - 1 - value].slots; }

    std::vector<Set> sets_;
    std::vector<int32_t> vacant_;
    std::unordered_map<Slots, int32_t, HashOfSlots> values_;
};

// Open addressing: the position of a key, or the free one for it.
size_t locate(const std::vector<uint64_t>& keys, uint64_t key) {
    const size_t mask = keys.size() - 1;
    size_t at = (key * 0x9E3779B97F4A7C15ull) >> (64 - __builtin_ctzll(keys.size()));
    while (keys[at] != key && keys[at] != FREE) at = (at + 1) & mask;
    return at;
}

struct Log {
    std::vector<uint64_t> keys;  // in the order of announcement
    int64_t num_held = 0;
    int64_t limit = LOG_SLACK;
};

class Prefixes {
  public:
    int64_t num_held(size_t slot) const { return slot < logs_.size() ? logs_[slot].num_held : 0; }

    int64_t num_bytes() const {
        size_t sum = keys_.capacity() * 8 + values_.capacity() * 4;
        for (const Log& log : logs_) sum += log.keys.capacity() * 8;
        return sum;
    }

    // The depth of the deepest key that each slot holds, and of all of them.
    int32_t depths(const uint64_t* chain, int64_t num_keys, int32_t* found, int64_t num_slots) const {
        std::fill(found, found + num_slots, 0);
        int32_t last = NO_HOLDER, deepest = 0;
        const auto set = [&](int32_t depth) {
            for (const int32_t* slot = sets_.begin(last); slot != sets_.end(last); slot++) found[*slot] = depth;
            if (last != NO_HOLDER) deepest = depth;
        };
        for (int64_t n = 0; n < num_keys; n++) {
            const size_t at = locate(keys_, chain[n]);
            const int32_t value = keys_[at] == FREE ? NO_HOLDER : values_[at];
            if (value != last) set(n);
            last = value;
        }
        set(num_keys);
        return deepest;
    }

    void add(size_t slot, const uint64_t* keys, int64_t num_keys, int64_t keys_max, bool backwards) {
        if (!num_keys) return;
        grow(num_keys);
        Log& log = log_of(slot);
        for (int64_t n = 0; n < num_keys; n++) {
            const uint64_t key = keys[backwards ? num_keys - 1 - n : n];
            const size_t at = locate(keys_, key);
            if (keys_[at] == FREE) {
                keys_[at] = key;
                used_++;
            }
            log.num_held += change(at, slot, true);
            log.keys.push_back(key);
        }
        if ((int64_t)log.keys.size() > std::min(log.limit, keys_max + keys_max / 4 + LOG_SLACK))
            compact(slot, keys_max);
    }

    void remove(size_t slot, const uint64_t* keys, int64_t num_keys) {
        if (slot >= logs_.size()) return;
        for (int64_t n = 0; n < num_keys; n++) {
            const size_t at = locate(keys_, keys[n]);
            if (keys_[at] != FREE) logs_[slot].num_held -= change(at, slot, false);
        }
    }

    void clear(size_t slot) {
        if (slot >= logs_.size()) return;
        const std::vector<uint64_t> keys = std::move(logs_[slot].keys);
        remove(slot, keys.data(), keys.size());
        logs_[slot] = Log();
    }

    // The keys of a slot, each at its last occurrence, the oldest first.
    std::vector<uint64_t> held(size_t slot) const {
        std::vector<uint64_t> kept;
        if (slot >= logs_.size()) return kept;
        const std::vector<uint64_t>& keys = logs_[slot].keys;
        size_t size = POSITIONS_MIN;
        while (size < 2 * keys.size()) size *= 2;
        std::vector<uint64_t> seen(size, FREE);
        for (size_t n = keys.size(); n-- > 0;) {
            const size_t at = locate(keys_, keys[n]);
            if (keys_[at] == FREE || !sets_.has(values_[at], slot)) continue;
            uint64_t& mark = seen[locate(seen, keys[n])];
            if (mark == FREE) kept.push_back(keys[n]);
            mark = keys[n];
        }
        std::reverse(kept.begin(), kept.end());
        return kept;
    }

  private:
    Log& log_of(size_t slot) {
        if (slot >= logs_.size()) logs_.resize(slot + 1);
        return logs_[slot];
    }

    // Adds the slot to the holders of the key there, or removes it. Returns whether that changed them.
    bool change(size_t at, int32_t slot, bool joins) {
        const int32_t before = values_[at];
        if (before != run_before_ || slot != run_slot_ || joins != run_joins_) {
            if (sets_.has(before, slot) == joins) return false;
            run_before_ = before, run_slot_ = slot, run_joins_ = joins;
            run_after_ = sets_.changed(before, slot, joins);
        }
        const int32_t after = run_after_;
        values_[at] = after;
        sets_.count(after, 1);
        sets_.count(before, -1);
        return true;
    }

    void compact(size_t slot, int64_t keys_max) {
        std::vector<uint64_t> kept = held(slot);
        const int64_t first = std::max<int64_t>(0, (int64_t)kept.size() - keys_max);
        remove(slot, kept.data(), first);
        Log& log = logs_[slot];
        log.keys.assign(kept.begin() + first, kept.end());
        log.num_held = log.keys.size();
        log.limit = 2 * log.num_held + LOG_SLACK;
    }

    // Makes room for more keys, and drops those without a holder.
    void grow(size_t num_keys) {
        if (used_ + num_keys <= FILL_MAX * keys_.size()) return;
        size_t num_held = 0, size = POSITIONS_MIN;
        for (const int32_t value : values_) num_held += value != NO_HOLDER;
        while (0.75 * FILL_MAX * size < num_held + num_keys) size *= 2;
        std::vector<uint64_t> keys(size, FREE);
        std::vector<int32_t> values(size, NO_HOLDER);
        for (size_t from = 0; from < keys_.size(); from++) {
            if (values_[from] == NO_HOLDER) continue;
            const size_t at = locate(keys, keys_[from]);
            keys[at] = keys_[from];
            values[at] = values_[from];
        }
        keys_.swap(keys);
        values_.swap(values);
        used_ = num_held;
    }

    std::vector<uint64_t> keys_ = std::vector<uint64_t>(POSITIONS_MIN, FREE);
    std::vector<int32_t> values_ = std::vector<int32_t>(POSITIONS_MIN, NO_HOLDER);
    size_t used_ = 0;
    HolderSets sets_;
    std::vector<Log> logs_;  // of each slot
    int32_t run_before_ = NO_HOLDER, run_slot_ = -1, run_after_ = NO_HOLDER;  // the last change
    bool run_joins_ = false;
};

// The columns of fleet_view.py.
enum Column {
    DECODES, PREFILLS, MIXED, NAME, NAMESPACE, BUSY_UNTIL_S, QUEUED_TOKENS, ROWS, STREAMS, BUDGET_BYTES,
    TAKEN_BYTES, CACHED_BYTES, STEP_S, TOKEN_S, PAIR_S, ROW_S, PAGE_S, STATE_S, STEP_TOKENS, ITL_TARGET_S,
    PAGE_TOKENS, PAGE_BYTES, STATE_BYTES, PUBLISHES
};
constexpr Column MEASURED[] = {STEP_S, TOKEN_S, PAIR_S, ROW_S, PAGE_S, STATE_S};

// The constants of the definition, in the order of compiled.py.
struct Constants {
    double gap_pages_max, gap_tokens_min, gap_s_max, home_share, hop_s, hop_pages, kappa, patience_s, full_s,
        overfull_s, filled_max, tokens_per_s, rho_max, tied, rho_tau_s, row_tokens, fetched_share, light_steps;
};

// What is placed, in the order of compiled.py.
struct Asked {
    double now_s, num_tokens, answer_tokens, recompute_all, work_s, num_avoided;
};

// The worker at a slot: its costs (cost_model.py) and what it has of the prompt, in tokens.
struct Worker {
    double announced, resident, restorable, page_tokens, step_tokens, wait, step, token, pair, row, page, state,
        light, slowdown_beside, slowdown;
    bool mixed, has_streams, has_rows;

    double computing(double start, double end) const {
        const double num_tokens = end - start;
        const double each = token + pair * ((start + end) / 2);
        return std::ceil(num_tokens / step_tokens) * step + num_tokens * each;
    }

    double serving(double start, double stored, double end) const {
        const double computed = computing(start, end), missing = stored - start;
        if (!(missing > 0)) return computed;
        return std::min(computed, missing / page_tokens * page + state + computing(stored, end));
    }

    double beside(double alone, double answer_tokens) const {
        const double slowed = alone * slowdown_beside;
        if (has_streams) return slowed;
        return has_rows ? std::min(slowed, alone + answer_tokens * light) : alone;
    }
};

struct Prefill {
    int64_t slot = -1;
    double done = 0, resident = 0;
};

class View {
  public:
    View(const Prefixes& prefixes, const double* table, int64_t num_slots, const uint64_t* keys, int64_t num_keys,
         uint64_t name, const int64_t* avoided, const Asked& asked, const Constants& constants, const double* extra)
        : table_(table), num_slots_(num_slots), keys_(keys), num_keys_(num_keys), name_(name),
          avoided_(avoided, avoided + (int64_t)asked.num_avoided), asked_(asked), constants_(constants), extra_(extra),
          depths_(2 * num_slots + 1) {
        shared_pages = prefixes.depths(keys, num_keys, depths_.data(), depths_.size());
        double page_tokens_max = 0;
        int64_t computing = 0;
        for (int64_t slot = 0; slot < num_slots; slot++) {
            const double page_tokens = at(PAGE_TOKENS, slot);
            page_tokens_max = std::max(page_tokens_max, page_tokens);
            stored_ = std::max(stored_, depths_[2 * slot + 1] * page_tokens * at(PUBLISHES, slot));
            in_seconds |= at(TOKEN_S, slot) != 0;
            computing += at(PREFILLS, slot) + at(MIXED, slot) != 0;
        }
        boundary_ = (double)num_keys * page_tokens_max;
        const double rho =
            std::min(computing ? asked.work_s / (constants.rho_tau_s * (double)computing) : 0.0, constants.rho_max);
        const double gap = 1 - rho;
        kappa_ = constants.kappa * std::max(1.0, rho * (2 - rho) / (gap * gap));
    }

    Worker worker(int64_t slot) {
        Worker w;
        w.page_tokens = at(PAGE_TOKENS, slot);
        w.step_tokens = at(STEP_TOKENS, slot);
        w.announced = depths_[2 * slot + 1] * w.page_tokens;
        w.resident = std::max(depths_[2 * slot + 1], depths_[2 * slot + 2]) * w.page_tokens;
        w.restorable = at(STATE_BYTES, slot) > 0 ? w.announced : w.resident;
        w.mixed = at(MIXED, slot) > 0;
        const bool decodes = at(DECODES, slot) > 0;
        w.has_streams = decodes && at(STREAMS, slot) > 0;
        w.has_rows = decodes && at(ROWS, slot) > 0;
        if (in_seconds) {
            w.wait = std::max(0.0, at(BUSY_UNTIL_S, slot) - asked_.now_s);
            const bool measured = at(TOKEN_S, slot) != 0;
            if (!measured && median_.empty()) find_median();
            double* const speeds[] = {&w.step, &w.token, &w.pair, &w.row, &w.page, &w.state};
            for (int n = 0; n < 6; n++) *speeds[n] = measured ? at(MEASURED[n], slot) : median_[n];
        } else {
            w.wait = at(QUEUED_TOKENS, slot);
            w.step = w.pair = w.state = 0;
            w.token = 1;
            w.row = constants_.row_tokens;
            w.page = w.page_tokens * constants_.fetched_share;
        }
        w.light = w.step + w.row * std::max(at(STREAMS, slot), 1.0);
        w.slowdown_beside = 1.0;  // nothing needs it without streams and rows
        if (w.has_streams || w.has_rows)
            w.slowdown_beside = in_seconds ? prompt_slowdown(w, at(ITL_TARGET_S, slot))
                                           : constants_.light_steps / (constants_.light_steps - 1);
        w.slowdown = w.has_streams ? w.slowdown_beside : 1.0;
        return w;
    }

    // The workers for this work. Those where the request failed are better than none.
    std::vector<int64_t> eligible(Column column) const {
        std::vector<int64_t> all, others;
        all.reserve(num_slots_);
        for (int64_t slot = 0; slot < num_slots_; slot++) {
            if (at(column, slot) == 0) continue;
            all.push_back(slot);
            if (!avoided_.empty() && std::find(avoided_.begin(), avoided_.end(), slot) == avoided_.end())
                others.push_back(slot);
        }
        return others.empty() ? all : others;
    }

    double prefill_time(const Worker& w, double start, double end) const {
        return w.beside(w.serving(start, stored_, end), asked_.answer_tokens);
    }

    // The cost to later requests of computing on each of the workers what another one has of `[0, end)`. `served`
    // has the cost of `[restorable, end)` if that is known.
    std::vector<double> duplicate_work(const std::vector<Worker>& workers, double end,
                                       const std::vector<double>* served = nullptr) const {
        std::vector<double> cost;
        cost.reserve(workers.size());
        double most = 0, wait = INFINITY;
        for (const Worker& w : workers) {
            most = std::max(most, w.resident);
            wait = std::min(wait, w.wait);
        }
        const double patience = constants_.patience_s * (in_seconds ? 1.0 : constants_.tokens_per_s) + wait;
        for (const Worker& w : workers) {
            const double whole = served && w.resident == w.restorable ? (*served)[cost.size()]
                                                                      : w.serving(w.resident, stored_, end);
            cost.push_back(std::min(kappa_ * (whole - w.serving(most, stored_, end)), patience));
        }
        return cost;
    }

    int64_t pick(const std::vector<int64_t>& slots, const std::vector<Worker>& workers,
                 const std::vector<double>& scores) const {
        const double most = *std::min_element(scores.begin(), scores.end()) * constants_.tied;
        std::vector<size_t> tied;
        for (size_t n = 0; n < slots.size(); n++)
            if (scores[n] <= most) tied.push_back(n);
        if (tied.size() == 1) return tied[0];
        double depth = 0;
        for (const size_t n : tied) depth = std::max(depth, workers[n].resident / workers[n].page_tokens);
        const uint64_t family = (int64_t)depth >= num_keys_ ? name_ : keys_[(int64_t)depth];
        constexpr uint64_t SPREAD = 0xD6E8FEB86659FD93ull;
        size_t best = tied[0];
        uint64_t highest = 0;
        for (const size_t n : tied) {
            uint64_t mixed = ((uint64_t)at(NAME, slots[n]) ^ family) * SPREAD;
            mixed = (mixed ^ (mixed >> 32)) * SPREAD;
            mixed ^= mixed >> 29;
            if (mixed > highest) highest = mixed, best = n;
        }
        return best;
    }

    Prefill best_prefill(const std::vector<int64_t>& slots) {
        Prefill best;
        if (slots.empty() || asked_.recompute_all) return best;
        std::vector<Worker> workers;
        std::vector<double> done, served;
        workers.reserve(slots.size());
        served.reserve(slots.size());
        done.reserve(slots.size());
        for (const int64_t slot : slots) {
            workers.push_back(worker(slot));
            const Worker& w = workers.back();
            served.push_back(w.serving(w.restorable, stored_, boundary_));
            done.push_back(w.wait + w.beside(served.back(), asked_.answer_tokens));
        }
        std::vector<double> scores = duplicate_work(workers, boundary_, &served);
        for (size_t n = 0; n < scores.size(); n++) scores[n] = done[n] + scores[n] + extra(slots[n]);
        const int64_t n = pick(slots, workers, scores);
        return {slots[n], done[n], workers[n].resident};
    }

    // Whether a decode worker computes the prompt `[start, end)` itself.
    bool computes_alone(const Worker& w, int64_t slot, double start, double decode_time, const Prefill& prefill) const {
        const double end = asked_.num_tokens;
        if (w.mixed || prefill.slot < 0) return true;
        if (end - start <= std::min(constants_.gap_pages_max * w.page_tokens,
                                    std::max(w.page_tokens, constants_.gap_tokens_min)))
            return true;
        if (at(NAMESPACE, slot) != at(NAMESPACE, prefill.slot)) return true;  // it cannot use those pages
        const bool homeless = prefill.resident < constants_.home_share * end || start >= prefill.resident;
        return in_seconds && homeless && w.computing(start, end) * w.slowdown <= constants_.gap_s_max &&
               decode_time <= prefill.done;
    }

    double needed_bytes(const Worker& w, int64_t slot) const {
        const double answer = at(DECODES, slot) > 0 ? asked_.answer_tokens : 0.0;
        const double pages = std::ceil((asked_.num_tokens + answer - w.restorable) / w.page_tokens);
        return pages * at(PAGE_BYTES, slot) + at(STATE_BYTES, slot);
    }

    double filled(const Worker& w, int64_t slot, double used) const {
        const double budget = at(BUDGET_BYTES, slot);
        return budget > 0 ? (used + needed_bytes(w, slot)) / std::max(budget, 1.0) : 0.0;
    }

    // The cost to later requests of the pages that give way to `[0, end)`.
    double evicted_work(const Worker& w, int64_t slot, double end) const {
        const double share = std::min(filled(w, slot, at(TAKEN_BYTES, slot) + at(CACHED_BYTES, slot)), 1.0);
        return std::max(end - w.resident, 0.0) * w.token * (share * share * share);
    }

    double crowding_penalty(const Worker& w, int64_t slot) const {
        const double rows = at(ROWS, slot), taken = filled(w, slot, at(TAKEN_BYTES, slot));
        const double overfull = taken > 1 ? constants_.overfull_s * taken : 0.0;
        if (!in_seconds) return rows * w.row + overfull * constants_.tokens_per_s;
        const double slowed = 2 * asked_.answer_tokens * rows * w.row;
        const double bounded = std::min(taken, constants_.filled_max);
        return slowed + constants_.full_s * bounded / (1 - bounded) + overfull;
    }

    // Places the request and returns whether a worker can decode. `made`: see compiled.py.
    bool place(double* made) {
        const std::vector<int64_t> slots = eligible(DECODES);
        if (slots.empty()) return false;
        const Prefill prefill = best_prefill(eligible(PREFILLS));
        std::vector<Worker> workers;
        workers.reserve(slots.size());
        for (const int64_t slot : slots) workers.push_back(worker(slot));
        const std::vector<double> duplicate = duplicate_work(workers, asked_.num_tokens);
        std::vector<double> scores, first_token;
        std::vector<char> alone;
        scores.reserve(slots.size());
        first_token.reserve(slots.size());
        for (size_t n = 0; n < slots.size(); n++) {
            const Worker& w = workers[n];
            const double start = w.mixed ? w.restorable : w.announced;
            const double decode_time = prefill_time(w, start, asked_.num_tokens);
            alone.push_back(computes_alone(w, slots[n], start, decode_time, prefill));
            double served = decode_time, locality = 0;
            if (alone.back()) {
                const double evicted = w.mixed ? evicted_work(w, slots[n], asked_.num_tokens) : 0.0;
                locality = (duplicate[n] + evicted) * w.slowdown;
            } else {
                const double pages = std::max(0.0, boundary_ - w.restorable) / w.page_tokens;
                const double late = std::min(pages, std::ceil(w.step_tokens / w.page_tokens));
                const double hop = in_seconds ? constants_.hop_s : constants_.hop_pages * w.page_tokens;
                const double fetch = late * w.page + (late > 0 ? w.state : 0.0);
                served = prefill.done + hop + fetch + w.computing(boundary_, asked_.num_tokens) * w.slowdown;
                locality = (pages - late) * w.page;
            }
            first_token.push_back(w.wait + served + w.step);
            scores.push_back(first_token.back() + locality + crowding_penalty(w, slots[n]) + extra(slots[n]));
        }
        const int64_t n = pick(slots, workers, scores);
        book(slots[n], alone[n] ? Prefill() : prefill, made);
        made[2] = in_seconds ? first_token[n] : 0.0;
        return true;
    }

    int32_t shared_pages = 0;
    bool in_seconds = false;

  private:
    double at(Column column, int64_t slot) const { return table_[column * num_slots_ + slot]; }

    // What else speaks against a worker; `Affinity` in placement.py.
    double extra(int64_t slot) const {
        return extra_ ? extra_[slot] * (in_seconds ? 1.0 : constants_.tokens_per_s) : 0.0;
    }

    // The load that the route adds to its workers.
    void book(int64_t decode, const Prefill& prefill, double* made) {
        const bool hops = prefill.slot >= 0;
        const int64_t slot = hops ? prefill.slot : decode;
        const Worker w = worker(slot);
        made[0] = decode;
        made[1] = prefill.slot;
        made[3] = shared_pages;
        made[4] = asked_.num_tokens - w.restorable;
        made[5] = in_seconds ? prefill_time(w, w.restorable, hops ? boundary_ : asked_.num_tokens) : 0.0;
        made[6] = needed_bytes(w, slot);
        made[7] = hops ? needed_bytes(worker(decode), decode) : made[6];
        made[8] = asked_.now_s + (in_seconds ? w.wait : 0.0) + made[5];
        made[9] = made[10] = 0;
        for (int64_t other = 0; other < num_slots_; other++) {
            const double pages = depths_[2 * other + 1];
            if (!pages || other == slot || at(NAMESPACE, other) != at(NAMESPACE, slot)) continue;
            if (pages > made[10] || (pages == made[10] && at(NAME, other) > at(NAME, (int64_t)made[9]))) {
                made[9] = other;
                made[10] = pages;
            }
        }
    }

    double prompt_slowdown(const Worker& w, double target) const {
        if (!(w.token > 0)) return 1.0;
        const double room = target > 0 ? std::max(target - w.light, w.light) : INFINITY;
        const double num_tokens =
            std::min(std::max(room / w.token, w.page_tokens), std::max(w.page_tokens, w.step_tokens));
        return (w.light / num_tokens + w.token) / (w.step / w.step_tokens + w.token);
    }

    void find_median() {
        for (const Column column : MEASURED) {
            std::vector<double> known;
            for (int64_t slot = 0; slot < num_slots_; slot++)
                if (at(TOKEN_S, slot) > 0) known.push_back(at(column, slot));
            std::sort(known.begin(), known.end());
            const size_t half = known.size() / 2;
            median_.push_back(known.size() % 2 ? known[half] : (known[half - 1] + known[half]) / 2);
        }
    }

    const double* table_;
    int64_t num_slots_;
    const uint64_t* keys_;
    int64_t num_keys_;
    uint64_t name_;
    std::vector<int64_t> avoided_;
    const Asked& asked_;
    const Constants& constants_;
    const double* extra_;
    std::vector<int32_t> depths_;
    std::vector<double> median_;
    double stored_ = 0, boundary_ = 0, kappa_ = 0;
};

Prefixes& prefixes_at(void* prefixes) { return *static_cast<Prefixes*>(prefixes); }

}  // namespace

extern "C" int64_t prefixes_make() { return reinterpret_cast<int64_t>(new Prefixes()); }

extern "C" void prefixes_free(void* prefixes) { delete static_cast<Prefixes*>(prefixes); }

extern "C" int64_t prefixes_num_held(void* prefixes, int64_t slot) { return prefixes_at(prefixes).num_held(slot); }

extern "C" int64_t prefixes_num_bytes(void* prefixes) { return prefixes_at(prefixes).num_bytes(); }

extern "C" void prefixes_depths(void* prefixes, const uint64_t* keys, int64_t num_keys, int32_t* found,
                                int64_t num_slots) {
    prefixes_at(prefixes).depths(keys, num_keys, found, num_slots);
}

extern "C" void prefixes_add(void* prefixes, int64_t slot, const uint64_t* keys, int64_t num_keys, int64_t keys_max,
                             int64_t backwards) {
    prefixes_at(prefixes).add(slot, keys, num_keys, keys_max, backwards);
}

extern "C" void prefixes_remove(void* prefixes, int64_t slot, const uint64_t* keys, int64_t num_keys) {
    prefixes_at(prefixes).remove(slot, keys, num_keys);
}

extern "C" void prefixes_clear(void* prefixes, int64_t slot) { prefixes_at(prefixes).clear(slot); }

// Returns the number of keys of a slot, of which `keys` takes the first `num_keys`.
extern "C" int64_t prefixes_held(void* prefixes, int64_t slot, uint64_t* keys, int64_t num_keys) {
    const std::vector<uint64_t> held = prefixes_at(prefixes).held(slot);
    std::copy_n(held.begin(), std::min<int64_t>(num_keys, held.size()), keys);
    return held.size();
}

// Places one request and returns 1, or 0 when no worker can decode. See compiled.py.
extern "C" int64_t place(void* prefixes, const double* table, int64_t num_slots, const uint64_t* keys, int64_t num_keys,
                         int64_t name, const int64_t* avoided, const double* asked, const double* constants,
                         const double* extra, double* made) {
    View view(prefixes_at(prefixes), table, num_slots, keys, num_keys, (uint64_t)name, avoided,
              *reinterpret_cast<const Asked*>(asked), *reinterpret_cast<const Constants*>(constants), extra);
    return view.place(made);
}
