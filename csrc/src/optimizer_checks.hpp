// Checks of a row optimizer's arguments, for both kinds of calls that take one.
#pragma once

#include <string>

#include "boundary.hpp"
#include "error.hpp"
#include "row_update.hpp"

namespace nestpipe {

inline RowOptimizer optimizer_of(const nestpipe_optimizer* optimizer, int32_t dtype) {
    need(optimizer, "optimizer");
    if (optimizer->kind < NESTPIPE_SGD || optimizer->kind > NESTPIPE_ADAM)
        refuse("there is no row optimizer of kind " + std::to_string(optimizer->kind));
    return {*optimizer, dtype};
}

}  // namespace nestpipe
