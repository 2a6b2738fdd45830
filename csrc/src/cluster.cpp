// Samples in an order in which neighbours share keys; cut into parts by cost; moved to parts that have their keys
// already.
#include "cluster.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "mix.hpp"

namespace nestpipe {
namespace {

constexpr int kIterations = 5;
constexpr int kRefinements = 2;
constexpr size_t kHashes = 3;
constexpr double kEndCost = 0.45;          // of the first and of the last part, as a share of a part between
constexpr double kMostOverload = 1.05;     // of a part between, as a share of its target
constexpr double kSmallestExtent = 1e-30;  // of a vector that is not just rounding errors
constexpr size_t kLanes = 8;               // parts that are counted together

// The keys that a sample shares with others; its other keys do not connect it to any. A sample has a key once.
struct SharedKeys {
    size_t num_samples, num_keys;
    std::vector<uint32_t> begin, keys;  // sample s has keys[begin[s] .. begin[s + 1])
    std::vector<double> uses;           // by key: how many samples have it
    std::vector<double> rarity;         // by sample: the sum of 1 / uses over all its keys, those of its own included

    size_t count(size_t sample) const { return begin[sample + 1] - begin[sample]; }

    template <typename Use>
    void each(size_t sample, Use&& use) const {
        const uint32_t* end = keys.data() + begin[sample + 1];
        for (const uint32_t* key = keys.data() + begin[sample]; key != end; ++key) use(*key);
    }
};

struct Seen {
    uint32_t last_sample_plus_one, uses;
    uint32_t number_plus_one;  // among shared keys
};

struct Ranked {
    double value;
    uint32_t sample;
    bool operator<(const Ranked& other) const {
        return value < other.value || (value == other.value && sample < other.sample);
    }
};

struct Plan {
    std::vector<double> target, most, load;  // cost, by part
    std::vector<uint32_t> part;              // by sample

    void put(size_t sample, size_t p, double cost) {
        part[sample] = static_cast<uint32_t>(p);
        load[p] += cost;
    }
};

// Arrays of one call. Each thread keeps its workspace for its next call: a fresh page costs more than the work on it.
struct Workspace {
    SharedKeys shared;
    std::vector<Seen> seen;
    std::vector<double> sample_values, key_values;
    std::vector<uint64_t> hashes;
    std::vector<Ranked> order, by_rarity;
    std::vector<uint8_t> at_end;
    std::vector<uint32_t> uses_in_part;
    Plan plan;
};
thread_local Workspace workspace;

// All distinct keys of each sample, by their number in the batch.
void list_keys(const nestpipe_batch& batch, SharedKeys& shared, std::vector<Seen>& seen) {
    seen.assign(static_cast<size_t>(batch.num_distinct), Seen{});
    size_t num_occurrences = 0;
    for (int32_t f = 0; f < batch.num_features; ++f) num_occurrences += static_cast<size_t>(batch.features[f].num_keys);
    shared.keys.resize(num_occurrences);
    shared.begin.resize(shared.num_samples + 1);
    uint32_t* next = shared.keys.data();
    for (size_t s = 0; s < shared.num_samples; ++s) {
        shared.begin[s] = static_cast<uint32_t>(next - shared.keys.data());
        for (int32_t f = 0; f < batch.num_features; ++f) {
            const nestpipe_key_lists& feature = batch.features[f];
            for (int64_t i = feature.offsets[s]; i < feature.offsets[s + 1]; ++i) {
                if (feature.index[i] < 0) continue;
                Seen& key = seen[static_cast<size_t>(feature.index[i])];
                const bool is_new = key.last_sample_plus_one != s + 1;
                key.last_sample_plus_one = static_cast<uint32_t>(s + 1);
                key.uses += is_new;
                *next = static_cast<uint32_t>(feature.index[i]);
                next += is_new;
            }
        }
    }
    shared.begin[shared.num_samples] = static_cast<uint32_t>(next - shared.keys.data());
}

// Removes keys that only one sample has and renumbers the others; both lists stay in order.
void keep_shared(SharedKeys& shared, std::vector<Seen>& seen) {
    shared.uses.clear();
    for (Seen& key : seen)
        if (key.uses > 1) {
            shared.uses.push_back(key.uses);
            key.number_plus_one = static_cast<uint32_t>(shared.uses.size());
        }
    shared.num_keys = shared.uses.size();
    shared.rarity.assign(shared.num_samples, 0.0);
    uint32_t* next = shared.keys.data();
    for (size_t s = 0, first = 0; s < shared.num_samples; ++s) {
        const size_t end = shared.begin[s + 1];
        const auto begin = static_cast<uint32_t>(next - shared.keys.data());
        double rarity = 0;
        for (size_t i = first; i < end; ++i) {
            const Seen& key = seen[shared.keys[i]];
            rarity += 1.0 / key.uses;
            *next = key.number_plus_one - 1;
            next += key.number_plus_one != 0;
        }
        shared.rarity[s] = rarity;
        shared.begin[s] = begin;
        first = end;
    }
    shared.begin[shared.num_samples] = static_cast<uint32_t>(next - shared.keys.data());
}

// Mean 0, where a sample counts as often as it has shared keys, and largest element 1. False: there is nothing left.
bool centre(const SharedKeys& shared, std::vector<double>& sample_values) {
    double sum = 0, largest = 0;
    for (size_t s = 0; s < shared.num_samples; ++s) sum += static_cast<double>(shared.count(s)) * sample_values[s];
    const double mean = sum / static_cast<double>(shared.begin[shared.num_samples]);
    for (size_t s = 0; s < shared.num_samples; ++s) {
        sample_values[s] = shared.count(s) == 0 ? 0 : sample_values[s] - mean;
        largest = std::max(largest, std::fabs(sample_values[s]));
    }
    if (!(largest > kSmallestExtent)) return false;
    for (double& value : sample_values) value /= largest;
    return true;
}

// A number for each sample, close for samples that share keys: the second eigenvector of going from a sample to one of
// its keys and on to a sample that has it, approached by iteration.
void spectrum(const SharedKeys& shared, uint64_t seed, std::vector<double>& sample_values,
              std::vector<double>& key_values) {
    sample_values.resize(shared.num_samples);
    for (size_t s = 0; s < shared.num_samples; ++s)
        sample_values[s] = static_cast<double>(mix64(mix64(seed) + s) >> 11) * 0x1p-52 - 1.0;
    for (int i = 0; i < kIterations && centre(shared, sample_values); ++i) {
        key_values.assign(shared.num_keys, 0.0);
        for (size_t s = 0; s < shared.num_samples; ++s) {
            const double value = sample_values[s];
            shared.each(s, [&](uint32_t key) { key_values[key] += value; });
        }
        for (size_t key = 0; key < shared.num_keys; ++key) key_values[key] /= shared.uses[key];
        for (size_t s = 0; s < shared.num_samples; ++s) {
            double sum = 0;
            shared.each(s, [&](uint32_t key) { sum += key_values[key]; });
            if (shared.count(s) > 0) sample_values[s] = sum / static_cast<double>(shared.count(s));
        }
    }
}

void order_by_spectrum(uint64_t seed, Workspace& work) {
    spectrum(work.shared, seed, work.sample_values, work.key_values);
    for (size_t s = 0; s < work.shared.num_samples; ++s)
        work.order[s] = {work.sample_values[s], static_cast<uint32_t>(s)};
    std::sort(work.order.begin(), work.order.end());
}

// By the smallest hash of each sample's keys, then by the smallest of another hash, and of a third.
void order_by_minhash(uint64_t seed, Workspace& work) {
    const SharedKeys& shared = work.shared;
    std::vector<uint64_t>& smallest = work.hashes;
    smallest.assign(shared.num_samples * kHashes, ~uint64_t{0});
    for (size_t h = 0; h < kHashes; ++h) {
        const uint64_t salt = mix64(mix64(seed) + h);
        for (size_t s = 0; s < shared.num_samples; ++s) {
            uint64_t least = ~uint64_t{0};
            shared.each(s, [&](uint32_t key) { least = std::min(least, mix64(salt ^ key)); });
            smallest[s * kHashes + h] = least;
        }
    }
    for (size_t s = 0; s < shared.num_samples; ++s) work.order[s] = {0.0, static_cast<uint32_t>(s)};
    std::sort(work.order.begin(), work.order.end(), [&](const Ranked& a, const Ranked& b) {
        for (size_t h = 0; h < kHashes; ++h) {
            const uint64_t hash_a = smallest[a.sample * kHashes + h], hash_b = smallest[b.sample * kHashes + h];
            if (hash_a != hash_b) return hash_a < hash_b;
        }
        return a.sample < b.sample;
    });
}

bool has_ends(size_t num_parts) { return num_parts >= 3; }

void set_targets(double total, size_t num_parts, size_t num_samples, Plan& plan) {
    const auto parts = static_cast<double>(num_parts);
    const double between = has_ends(num_parts) ? total / (parts - 2 + 2 * kEndCost) : total / parts;
    plan.target.assign(num_parts, between);
    plan.most.assign(num_parts, between * kMostOverload);
    if (has_ends(num_parts))
        for (size_t end : {size_t{0}, num_parts - 1}) plan.target[end] = plan.most[end] = between * kEndCost;
    plan.load.assign(num_parts, 0.0);
    plan.part.resize(num_samples);
}

// The samples whose keys others have too, as far as there is room for them in the first and the last part: whatever
// those two use is exposed. Returns their cost.
double choose_ends(const nestpipe_batch& batch, double room, Workspace& work) {
    for (size_t s = 0; s < work.shared.num_samples; ++s)
        work.by_rarity[s] = {work.shared.rarity[s] / batch.cost[s], static_cast<uint32_t>(s)};
    std::sort(work.by_rarity.begin(), work.by_rarity.end());
    double sum = 0;
    for (const Ranked& ranked : work.by_rarity)
        if (sum + batch.cost[ranked.sample] <= room) {
            sum += batch.cost[ranked.sample];
            work.at_end[ranked.sample] = 1;
        }
    return sum;
}

// The parts first, first + step, ...: `count` of them.
struct Parts {
    size_t first, step, count;
};

// Puts the samples marked so, in order, into parts of equal cost; their cost is `total`.
void cut(const nestpipe_batch& batch, uint8_t mark, double total, Parts parts, Workspace& work) {
    double before = 0;
    for (const Ranked& ranked : work.order) {
        if (work.at_end[ranked.sample] != mark) continue;
        const double cost = batch.cost[ranked.sample];
        const double place = (before + cost / 2) / total * static_cast<double>(parts.count);
        const size_t number = std::min(static_cast<size_t>(place), parts.count - 1);
        work.plan.put(ranked.sample, parts.first + parts.step * number, cost);
        before += cost;
    }
}

void cut_into_parts(const nestpipe_batch& batch, size_t num_parts, Workspace& work) {
    const double total = std::accumulate(batch.cost, batch.cost + batch.num_samples, 0.0);
    set_targets(total, num_parts, work.shared.num_samples, work.plan);
    work.at_end.assign(work.shared.num_samples, 0);
    if (!has_ends(num_parts)) return cut(batch, 0, total, {0, 1, num_parts}, work);
    const double end_cost = choose_ends(batch, 2 * work.plan.target[0], work);
    cut(batch, 1, end_cost, {0, num_parts - 1, 2}, work);
    cut(batch, 0, total - end_cost, {1, 1, num_parts - 2}, work);
}

// Moves samples, one after the other, to the part that has most of their shared keys already. A part that is fuller
// than its target by some share must have as large a share of the sample's keys more; none may become fuller than its
// most.
class Refinement {
 public:
    Refinement(const nestpipe_batch& batch, Workspace& work)
        : batch_(batch), shared_(work.shared), plan_(work.plan), uses_(work.uses_in_part) {
        num_parts_ = plan_.load.size();
        width_ = (num_parts_ + kLanes - 1) / kLanes * kLanes;
        present_.resize(width_);
        uses_.assign(shared_.num_keys * width_, 0);
        for (size_t s = 0; s < shared_.num_samples; ++s)
            shared_.each(s, [&](uint32_t key) { ++uses_[key * width_ + plan_.part[s]]; });
    }

    void pass() {
        for (size_t s = 0; s < shared_.num_samples; ++s) {
            const size_t from = plan_.part[s];
            plan_.load[from] -= batch_.cost[s];
            const size_t to = best_part(s, from);
            plan_.put(s, to, batch_.cost[s]);
            if (to == from) continue;
            shared_.each(s, [&](uint32_t key) {
                --uses_[key * width_ + from];
                ++uses_[key * width_ + to];
            });
        }
    }

 private:
    // present_[p] = how many of the sample's shared keys other samples bring to part p.
    void count_present(size_t sample, size_t own) {
        for (size_t first = 0; first < width_; first += kLanes) {
            uint32_t lanes[kLanes] = {};
            shared_.each(sample, [&](uint32_t key) {
                const uint32_t* uses = uses_.data() + key * width_ + first;
                for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += uses[lane] != 0;
            });
            std::copy(lanes, lanes + kLanes, present_.begin() + static_cast<std::ptrdiff_t>(first));
        }
        uint32_t by_others = 0;
        shared_.each(sample, [&](uint32_t key) { by_others += uses_[key * width_ + own] > 1; });
        present_[own] = by_others;
    }

    // The sample's own cost is in no load. Where nothing has room it stays.
    size_t best_part(size_t sample, size_t own) {
        count_present(sample, own);
        const auto num_keys = static_cast<double>(shared_.count(sample));
        size_t best = num_parts_;
        double most = 0;
        for (size_t p = 0; p < num_parts_; ++p) {
            if (plan_.load[p] + batch_.cost[sample] > plan_.most[p]) continue;
            const double worth = present_[p] - num_keys * (plan_.load[p] / plan_.target[p] - 1);
            if (best == num_parts_ || worth > most || (worth == most && p == own)) {
                most = worth;
                best = p;
            }
        }
        return best == num_parts_ ? own : best;
    }

    const nestpipe_batch& batch_;
    const SharedKeys& shared_;
    Plan& plan_;
    std::vector<uint32_t>& uses_;  // [key, part]
    std::vector<uint32_t> present_;
    size_t num_parts_, width_;
};

void write(const Plan& plan, int64_t* order, int64_t* part_offsets) {
    std::fill(part_offsets, part_offsets + plan.load.size() + 1, 0);
    for (uint32_t part : plan.part) ++part_offsets[part + 1];
    std::partial_sum(part_offsets, part_offsets + plan.load.size() + 1, part_offsets);
    std::vector<int64_t> next(part_offsets, part_offsets + plan.load.size());
    for (size_t s = 0; s < plan.part.size(); ++s) order[next[plan.part[s]]++] = static_cast<int64_t>(s);
}

}  // namespace

void cluster(const nestpipe_batch& batch, int32_t num_parts, nestpipe_cluster_method method, uint64_t seed,
             int64_t* order, int64_t* part_offsets) {
    Workspace& work = workspace;
    work.shared.num_samples = static_cast<size_t>(batch.num_samples);
    list_keys(batch, work.shared, work.seen);
    keep_shared(work.shared, work.seen);
    work.order.resize(work.shared.num_samples);
    work.by_rarity.resize(work.shared.num_samples);
    if (method == NESTPIPE_SPECTRAL)
        order_by_spectrum(seed, work);
    else
        order_by_minhash(seed, work);
    cut_into_parts(batch, static_cast<size_t>(num_parts), work);
    if (method == NESTPIPE_SPECTRAL) {
        Refinement refinement(batch, work);
        for (int i = 0; i < kRefinements; ++i) refinement.pass();
    }
    write(work.plan, order, part_offsets);
}

}  // namespace nestpipe
