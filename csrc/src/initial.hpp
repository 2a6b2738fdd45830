// Initial values: the same bits for (seed, table name, key) on every machine, rank and day.
#pragma once

#include <cstdint>
#include <vector>

#include "nestpipe.h"

namespace nestpipe {

// Standard normal quantile of 0 < p < 1 (Wichura's AS 241, PPND16), by + - * / and sqrt alone.
double normal_quantile(double p);

class InitialRecord {
 public:
    InitialRecord(const nestpipe_table_spec& spec, uint64_t salt);

    // Writes the first num_columns columns of the initial record of the key with this hash.
    void write(uint64_t hash, char* record, int64_t num_columns) const;

 private:
    double value(uint64_t stream, int64_t column) const;
    template <typename Real>
    void write_as(uint64_t hash, Real* record, int64_t num_columns) const;

    int32_t kind_;
    int32_t dtype_;
    int64_t dim_;
    double a_, b_;
    uint64_t seed_;
    std::vector<double> state_;
};

}  // namespace nestpipe
