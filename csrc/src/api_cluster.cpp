// The C boundary of clustering.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "boundary.hpp"
#include "cluster.hpp"
#include "nestpipe.h"

using namespace nestpipe;

namespace {

constexpr int64_t kMost = int64_t{1} << 31;

void need_at_most(int64_t count, const char* what) {
    need_count(count, what);
    if (count > kMost) refuse("cluster: " + std::string(what) + " is " + std::to_string(count) + ", at most 2^31");
}

void check_lists(const nestpipe_key_lists& lists, const nestpipe_batch& batch) {
    need_at_most(lists.num_keys, "num_keys");
    need_array(lists.index, lists.num_keys, "index");
    need(lists.offsets, "offsets");
    const int64_t* end = lists.offsets + batch.num_samples;
    if (lists.offsets[0] != 0 || *end != lists.num_keys || !std::is_sorted(lists.offsets, end + 1))
        refuse("cluster: offsets do not rise from 0 to num_keys");
    const int64_t num_distinct = batch.num_distinct;
    const auto is_key = [num_distinct](int64_t number) { return number < num_distinct; };
    if (!std::all_of(lists.index, lists.index + lists.num_keys, is_key))
        refuse("cluster: index is not below num_distinct");
}

void check_batch(const nestpipe_batch* batch) {
    need(batch, "batch");
    need_at_most(batch->num_samples, "num_samples");
    need_at_most(batch->num_distinct, "num_distinct");
    need_at_most(batch->num_features, "num_features");
    need_array(batch->features, batch->num_features, "features");
    need_array(batch->cost, batch->num_samples, "cost");
    const auto is_cost = [](double cost) { return cost > 0 && std::isfinite(cost); };
    if (!std::all_of(batch->cost, batch->cost + batch->num_samples, is_cost))
        refuse("cluster: a cost is not above 0 and finite");
    if (!std::isfinite(std::accumulate(batch->cost, batch->cost + batch->num_samples, 0.0)))
        refuse("cluster: the costs add up to more than a number can hold");
    int64_t num_keys = 0;
    for (int32_t f = 0; f < batch->num_features; ++f) {
        check_lists(batch->features[f], *batch);
        num_keys += batch->features[f].num_keys;
        need_at_most(num_keys, "the number of keys of all features");
    }
}

}  // namespace

nestpipe_status nestpipe_cluster(const nestpipe_batch* batch, int32_t num_parts, nestpipe_cluster_method method,
                                 uint64_t seed, int64_t* order, int64_t* part_offsets) {
    return guarded([&] {
        check_batch(batch);
        if (num_parts < 1 || num_parts > NESTPIPE_MAX_PARTS)
            refuse("num_parts is " + std::to_string(num_parts) + ", must be 1 .. 4096");
        if (method != NESTPIPE_SPECTRAL && method != NESTPIPE_MINHASH) refuse("cluster: unknown method");
        need_array(order, batch->num_samples, "order");
        need(part_offsets, "part_offsets");
        cluster(*batch, num_parts, method, seed, order, part_offsets);
    });
}
