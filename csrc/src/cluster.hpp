// Clustering: chooses the samples of each part of a batch, so that parts share few keys.
#pragma once

#include <cstdint>

#include "nestpipe.h"

namespace nestpipe {

// Arguments and result as in nestpipe_cluster, checked.
void cluster(const nestpipe_batch& batch, int32_t num_parts, nestpipe_cluster_method method, uint64_t seed,
             int64_t* order, int64_t* part_offsets);

}  // namespace nestpipe
