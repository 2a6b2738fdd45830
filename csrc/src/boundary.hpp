// Common parts of all functions of the C boundary: check arguments, turn exceptions into status codes and text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <new>
#include <string>

#include "error.hpp"

namespace nestpipe {

inline thread_local char last_error[1024];  // not a string: reporting that memory ran out must not need memory

inline void say(const char* text) noexcept { std::snprintf(last_error, sizeof last_error, "%s", text); }

template <typename Call>
nestpipe_status guarded(Call&& call) noexcept {
    try {
        last_error[0] = '\0';
        call();
        return NESTPIPE_OK;
    } catch (const Error& error) {
        say(error.what());
        return error.status();
    } catch (const std::bad_alloc&) {
        say("out of memory");
        return NESTPIPE_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        say(error.what());
        return NESTPIPE_INTERNAL;
    }
}

inline void need(const void* pointer, const char* what) {
    if (pointer == nullptr) refuse(std::string(what) + " is a null pointer");
}

// An array of `count` elements: a null pointer is fine when there are none.
inline void need_array(const void* pointer, int64_t count, const char* what) {
    if (count > 0) need(pointer, what);
}

inline void need_count(int64_t count, const char* what) {
    // 2^40 elements of anything are more than a machine holds.
    if (count < 0 || count >= int64_t{1} << 40)
        refuse(std::string(what) + " is " + std::to_string(count) + ", must be 0 .. 2^40 - 1");
}

// Places in an array of `size` elements.
inline void need_places(const int64_t* places, int64_t count, int64_t size, const char* what) {
    need_count(size, "size of the array");
    need_array(places, count, what);
    for (int64_t i = 0; i < count; ++i)
        if (places[i] < 0 || places[i] >= size)
            refuse(std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(places[i]) +
                   ", outside of an array of " + std::to_string(size));
}

// Table t has keys offsets[t] .. offsets[t + 1] - 1.
inline void need_table_offsets(const int64_t* offsets, int64_t num_tables, int64_t num_keys, const std::string& what) {
    need_count(num_tables, "num_tables");
    need_count(num_keys, "num_keys");
    need(offsets, what.c_str());
    const int64_t* last = offsets + num_tables;
    if (offsets[0] != 0 || *last != num_keys || !std::is_sorted(offsets, last + 1))
        refuse(what + " of " + std::to_string(num_tables) + " tables do not rise from 0 to the number of keys, " +
               std::to_string(num_keys));
}

inline void need_threads(int32_t num_threads) {
    if (num_threads < 1 || num_threads > NESTPIPE_MAX_THREADS)
        refuse("num_threads is " + std::to_string(num_threads) + ", must be 1 .. 1024");
}

}  // namespace nestpipe
