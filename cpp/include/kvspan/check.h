// Errors and argument checks.
//
// Two kinds of failure are kept apart. A caller's mistake (wrong shape, dtype, device, value) is an
// ArgumentError or TypeError and names the argument, what was expected and what came; the binding
// turns it into ValueError or TypeError. A broken invariant of kvspan itself is an InternalError.
#pragma once

#include <cstdint>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace kvspan {

// The caller passed a bad value: Python's ValueError.
class ArgumentError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The caller passed a value of the wrong type (dtype, object kind): Python's TypeError.
class TypeError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The device cannot do what was asked (no CUDA in this build, no device, a failed CUDA call).
class DeviceError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A bug in kvspan.
class InternalError : public std::logic_error {
  using std::logic_error::logic_error;
};

// Joins its arguments as operator<< prints them.
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// An argument's name in a message, put together only when a message is: "k_src", or "k_src[3]" for
// one tensor of a list.
struct ArgName {
  const char* name;
  std::int64_t index = -1;

  ArgName(const char* name_of_argument, std::int64_t index_in_list = -1)
      : name(name_of_argument), index(index_in_list) {}

  friend std::ostream& operator<<(std::ostream& out, const ArgName& arg) {
    out << arg.name;
    return arg.index < 0 ? out : out << '[' << arg.index << ']';
  }
};

[[noreturn]] void throw_internal_error(const char* condition, const char* file, int line);

}  // namespace kvspan

// Throws ERROR(message) unless the condition holds; the message is only built on failure.
#define KVSPAN_CHECK(condition, ERROR, ...)                       \
  do {                                                            \
    if (!(condition)) throw ERROR(::kvspan::concat(__VA_ARGS__)); \
  } while (false)

// Checks an argument's value.
#define KVSPAN_CHECK_ARG(condition, ...) \
  KVSPAN_CHECK(condition, ::kvspan::ArgumentError, __VA_ARGS__)

// Checks an invariant of kvspan's own.
#define KVSPAN_ASSERT(condition) \
  ((condition) ? void() : ::kvspan::throw_internal_error(#condition, __FILE__, __LINE__))
