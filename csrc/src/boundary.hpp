// Common parts of all functions of the C boundary: check arguments, turn exceptions into status codes and text.
#pragma once

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

inline void need_threads(int32_t num_threads) {
    if (num_threads < 1 || num_threads > NESTPIPE_MAX_THREADS)
        refuse("num_threads is " + std::to_string(num_threads) + ", must be 1 .. 1024");
}

}  // namespace nestpipe
