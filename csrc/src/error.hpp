// Errors inside the library are exceptions; api.cpp turns them into status codes at the C boundary.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "nestpipe.h"

namespace nestpipe {

class Error : public std::exception {
 public:
    Error(nestpipe_status status, std::string text) : status_(status), text_(std::move(text)) {}
    nestpipe_status status() const { return status_; }
    const char* what() const noexcept override { return text_.c_str(); }

 private:
    nestpipe_status status_;
    std::string text_;
};

[[noreturn]] inline void refuse(const std::string& text) { throw Error(NESTPIPE_INVALID_ARGUMENT, text); }

}  // namespace nestpipe
