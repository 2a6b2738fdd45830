// A minimal test framework that names what failed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "nestpipe.h"

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (false)

// A call that must succeed.
#define OK(call)                                                                                                    \
    do {                                                                                                            \
        if (const nestpipe_status status = (call); status != NESTPIPE_OK) {                                         \
            std::fprintf(stderr, "%s:%d: %s: status %d: %s\n", __FILE__, __LINE__, #call, static_cast<int>(status), \
                         nestpipe_last_error());                                                                    \
            std::exit(1);                                                                                           \
        }                                                                                                           \
    } while (false)

// A call that must be refused, with a text that says why.
#define REFUSED(wanted_status, wanted_text, call)                                                                     \
    do {                                                                                                              \
        const nestpipe_status status = (call);                                                                        \
        const std::string text = nestpipe_last_error();                                                               \
        if (status != (wanted_status) || text.find(wanted_text) == std::string::npos) {                               \
            std::fprintf(stderr, "%s:%d: %s: status %d: '%s' instead of %d: '...%s...'\n", __FILE__, __LINE__, #call, \
                         static_cast<int>(status), text.c_str(), static_cast<int>(wanted_status), wanted_text);       \
            std::exit(1);                                                                                             \
        }                                                                                                             \
    } while (false)

// A small table for tests: float32, `dim` columns and `state_width` of state that starts at 0.5.
inline nestpipe_table_spec small_table(const char* name, int64_t dim, int64_t state_width = 0) {
    static const double state[8] = {0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5};
    nestpipe_table_spec spec{};
    spec.name = name;
    spec.dim = dim;
    spec.state_width = state_width;
    spec.initial_state = state;
    spec.seed = 7;
    spec.initial = NESTPIPE_NORMAL;
    spec.initial_b = 0.02;
    spec.dtype = NESTPIPE_FLOAT32;
    return spec;
}
