// CHECK: an invariant of ours that stays on in every build.
//
// A failed CHECK is our bug. It prints the place, the expression and the values, then aborts; the
// supervisor sees a dead process. Bad input never reaches a CHECK: it becomes a Result (result.h).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <type_traits>

namespace weft::internal {

[[noreturn]] inline void check_failed(const char* file, int line, const char* expression,
                                      const std::string& values) {
  std::fprintf(stderr, "CHECK failed at %s:%d: %s%s%s\n", file, line, expression, values.empty() ? "" : " — ",
               values.c_str());
  std::fflush(stderr);
  std::abort();
}

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(static_cast<std::underlying_type_t<T>>(value));
  } else {
    out << value;
  }
  return out.str();
}

template <typename A, typename B>
std::string show_pair(const A& a, const B& b) {
  return show(a) + " against " + show(b);
}

inline std::string join() { return {}; }
template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace weft::internal

// CHECK(ok) or CHECK(ok, "part ", value, …): the parts are only evaluated on failure.
#define CHECK(expression, ...)                                                                              \
  do {                                                                                                      \
    if (!(expression)) [[unlikely]] {                                                                       \
      ::weft::internal::check_failed(__FILE__, __LINE__, #expression, ::weft::internal::join(__VA_ARGS__)); \
    }                                                                                                       \
  } while (false)

#define WEFT_CHECK_OP(op, a, b)                                                      \
  do {                                                                               \
    const auto& check_a = (a);                                                       \
    const auto& check_b = (b);                                                       \
    if (!(check_a op check_b)) [[unlikely]] {                                        \
      ::weft::internal::check_failed(__FILE__, __LINE__, #a " " #op " " #b,          \
                                     ::weft::internal::show_pair(check_a, check_b)); \
    }                                                                                \
  } while (false)

#define CHECK_EQ(a, b) WEFT_CHECK_OP(==, a, b)
#define CHECK_NE(a, b) WEFT_CHECK_OP(!=, a, b)
#define CHECK_LT(a, b) WEFT_CHECK_OP(<, a, b)
#define CHECK_LE(a, b) WEFT_CHECK_OP(<=, a, b)
#define CHECK_GT(a, b) WEFT_CHECK_OP(>, a, b)
#define CHECK_GE(a, b) WEFT_CHECK_OP(>=, a, b)
